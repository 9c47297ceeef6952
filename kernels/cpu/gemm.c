/* The grouped GEMM of the cpu: every member's product is cut into blocks, which the threads take in
 * turn.
 *
 * A block is computed by one thread and its sums do not depend on how the product is cut, so the
 * cut may follow the number of threads. */
#include "kernels/cpu/gemm_priv.h"

/* Products below which waking the other threads takes longer than the sums. */
enum { WORTH_THREADS = 1 << 16 };

/* A grouped product with everything a block needs. Members have rows[e] = start[e + 1] - start[e]:
 * of A and D, or, for NT, of the depth. `a` and `b` are those of member 0. */
struct product {
    const struct mt_gemm_args *args;
    const gemm_kernel *kernel;
    int64_t members, cols, depth, height; /* height: rows of D where they are not ragged, else -1 */
    int64_t a_width;                      /* reals or elements in a line of A's memory */
    gemm_matrix a, b;
    gemm_beside beside;
    bool d_real;
    int64_t *start; /* [members + 1] first row */
    int64_t *first; /* [members + 1] first task */
    int64_t col_parts;
    char *packed; /* compact weights in the form that the kernel wants, or NULL */
};

static bool is_real(mt_dtype dtype)
{
    return dtype == MT_REAL_DTYPE;
}

/* The cpu multiplies elements and reals, weights also packed. */
static mt_status check_operand(const mt_direction *dir, const char *name, bool weight)
{
    mt_dtype dtype = dir->format->dtype;
    MT_REQUIRE(dir->format->element == MT_ELEMENT_PLAIN &&
                   (dtype == MT_ELEM_DTYPE || dtype == MT_REAL_DTYPE),
               MT_EUNSUPPORTED, "gemm: %s has format %s, the cpu multiplies %s and %s", name,
               dir->format->name, mt_dtype_name(MT_ELEM_DTYPE), mt_dtype_name(MT_REAL_DTYPE));
    MT_REQUIRE(dir->layout == MT_LAYOUT_COMPACT ||
                   (weight && dir->layout == MT_LAYOUT_PACKED && dtype == MT_ELEM_DTYPE),
               MT_EUNSUPPORTED, "gemm: %s has layout %d, which the cpu does not read", name,
               (int)dir->layout);
    return MT_OK;
}

static mt_status describe(struct product *p, const struct mt_gemm_args *args,
                          const gemm_kernel *kernel)
{
    const mt_direction *a = mt_gemm_b(args), *b = mt_gemm_a(args);
    const mt_group *ga = &args->b->group, *gb = &args->a->group;
    bool ragged_depth = args->layout == MT_GEMM_NT, along = args->layout == MT_GEMM_TN;
    MT_TRY(check_operand(b, "a", !ragged_depth));
    MT_TRY(check_operand(a, "b", false));
    *p = (struct product){
        .args = args,
        .kernel = kernel,
        .members = ga->members,
        .cols = along ? gb->m : gb->k,
        .depth = along ? gb->k : gb->m,
        .height = ragged_depth ? ga->k : -1,
        .a_width = ga->k,
        .a = { a->codes, GEMM_PLAIN, is_real(a->format->dtype), 1, 1 },
        .b = { b->codes, GEMM_PLAIN, is_real(b->format->dtype), 1, 1 },
        .d_real = is_real(args->d_dtype),
    };
    *(ragged_depth ? &p->a.step : &p->a.outer) = ga->k;
    *(along ? &p->b.outer : &p->b.step) = gb->k;
    if (b->layout == MT_LAYOUT_PACKED) p->b.form = GEMM_PACKED;
    return MT_OK;
}

static bool packs(const struct product *p)
{
    return p->height < 0 && p->b.form == GEMM_PLAIN && p->kernel->weight != GEMM_PLAIN;
}

static int64_t rows_of(const struct product *p, int64_t e)
{
    return p->height < 0 ? p->start[e + 1] - p->start[e] : p->height;
}

/* Blocks that the rows of member e's D are cut into: by its share of the work, which is its rows of
 * A (TN, NN: rows of D; NT: depth). Blocks of NT copy all of B, so that few and large ones are
 * best. A member with most of the work is cut evenly over the threads, and that of NT is deep
 * beside its height: what a thin block copies of B is little then beside another thread's share. */
static int64_t row_parts(const struct product *p, int64_t e, int threads)
{
    const gemm_kernel *k = p->kernel;
    int64_t share = p->start[e + 1] - p->start[e], total = gemm_max(p->start[p->members], 1);
    bool lone = 2 * share > total, deep = lone && p->height >= 0;
    int64_t rows = rows_of(p, e);
    int64_t most = gemm_max(1, rows / (deep ? k->fewest_deep : k->fewest_rows));
    int64_t each = p->height < 0 ? (lone ? 4 : 12) : (lone ? 1 : 2); /* blocks of a thread */
    int64_t parts = mt_min(mt_ceil_div(each * threads * share, total), most);
    parts = gemm_max(parts, mt_ceil_div(rows, k->rows));
    return lone && most >= threads ? gemm_round_up(parts, threads) : gemm_max(parts, 1);
}

static void cut(struct product *p, int threads)
{
    const mt_group *g = &p->args->b->group;
    int64_t tasks = 0;
    p->start[0] = p->first[0] = 0;
    for (int64_t e = 0; e < p->members; e++) p->start[e + 1] = p->start[e] + mt_group_rows(g, e);
    for (int64_t e = 0; e < p->members; e++) tasks += row_parts(p, e, threads);
    int64_t units = mt_ceil_div(p->cols, p->kernel->unit), wanted = 1;
    if (tasks && tasks < 2 * threads) wanted = mt_min(mt_ceil_div(4 * threads, tasks), units / 4);
    p->col_parts = gemm_max(mt_ceil_div(p->cols, p->kernel->cols), wanted);
    for (int64_t e = 0; e < p->members; e++)
        p->first[e + 1] = p->first[e] + row_parts(p, e, threads) * p->col_parts;
}

/* Cuts `count` into `parts` equal ranges that begin at multiples of `unit`. */
static int64_t range(int64_t *begin, int64_t count, int64_t part, int64_t parts, int64_t unit)
{
    int64_t units = mt_ceil_div(count, unit);
    *begin = mt_min(units * part / parts * unit, count);
    return mt_min(units * (part + 1) / parts * unit, count) - *begin;
}

static void *moved(const void *base, bool real, int64_t count)
{
    return base ? (char *)(uintptr_t)base +
                      count * (int64_t)(real ? sizeof(mt_real) : sizeof(mt_elem))
                : NULL;
}

/* Member e's B, or its place among the packed ones. */
static gemm_matrix member_b(const struct product *p, int64_t e)
{
    gemm_matrix b = p->b;
    if (p->height >= 0)
        b.data = moved(b.data, b.real, p->start[e] * p->cols);
    else if (b.form == GEMM_PLAIN)
        b.data = moved(b.data, b.real, e * p->cols * p->depth);
    else
        b.data = (const char *)b.data + (size_t)e * gemm_form_bytes(b.form, p->cols, p->depth);
    return b;
}

/* Of member e's sums: the product of both factors and 1, so that one far above and one far below 1
 * leave nothing between them; or one after the other, where f32 has no normal number for that. */
static void set_factors(float factors[2], const gemm_beside *b, int64_t e)
{
    float first = b->factors[0] ? b->factors[0][e] : 1;
    float second = b->factors[1] ? b->factors[1][e] : 1;
    bool normal = isnormal(first * second);
    factors[0] = normal ? first * second : first;
    factors[1] = normal ? 1 : second;
}

/* What is beside a block at row r0 of member e, whose D starts at row `line` of all. */
static void beside_block(gemm_block *k, const struct product *p, int64_t e, int64_t line,
                         int64_t j0)
{
    const gemm_beside *b = &p->beside;
    set_factors(k->factors, b, e);
    if (b->row_token && p->height >= 0) {
        k->b.data = moved(p->b.data, p->b.real, j0 * k->b.outer);
        k->b_depths = b->row_token + p->start[e];
    } else if (b->row_token) {
        k->a.data = p->a.data;
        k->a_rows = b->row_token + line;
    }
    if (b->act && p->col_parts == 1) k->act = moved(b->act, false, line * (p->cols / 2));
    if (!b->z) return;
    int64_t at = 2 * line * p->cols + j0;
    k->half = p->cols, k->ld = 2 * p->cols;
    k->z = moved(b->z, false, at);
    k->d = moved(p->args->d, false, at + p->cols);
}

/* What a task computes. */
static gemm_block block_of(const struct product *p, int64_t task)
{
    int64_t low = 0, high = p->members; /* first[low] <= task < first[high] */
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (p->first[middle] <= task)
            low = middle;
        else
            high = middle;
    }
    int64_t e = low, part = task - p->first[e], r0, j0;
    int64_t parts = (p->first[e + 1] - p->first[e]) / p->col_parts;
    bool ragged_depth = p->height >= 0;
    gemm_block k = {
        .rows = range(&r0, rows_of(p, e), part / p->col_parts, parts, 1),
        .cols = range(&j0, p->cols, part % p->col_parts, p->col_parts, p->kernel->unit),
        .depth = ragged_depth ? p->start[e + 1] - p->start[e] : p->depth,
        .a = p->a,
        .b = member_b(p, e),
        .d_real = p->d_real,
        .ld = p->cols,
    };
    int64_t member = ragged_depth ? e * p->height : p->start[e], at = (member + r0) * p->cols + j0;
    k.a.data = moved(k.a.data, k.a.real, p->start[e] * p->a_width + r0 * k.a.outer);
    if (k.b.form == GEMM_PLAIN)
        k.b.data = moved(k.b.data, k.b.real, j0 * k.b.outer);
    else
        k.b.data = gemm_panel_at(k.b.form, k.b.data, j0, k.depth);
    k.c = moved(p->args->c, p->d_real, at);
    k.d = moved(p->args->d, p->d_real, at);
    k.bias = moved(p->args->bias, true, e * p->cols + j0);
    beside_block(&k, p, e, member + r0, j0);
    return k;
}

/* next: the task that this thread may have after it, if there is one of this number. */
static void run_task(const struct product *p, int64_t task, int64_t next, void *scratch)
{
    gemm_block k = block_of(p, task), after;
    if (!k.rows || !k.cols) return;
    if (next < p->first[p->members]) after = block_of(p, next), k.next = &after;
    p->kernel->block(&k, scratch);
}

/* Packs columns of a compact weight; t counts (member, columns). */
static void pack_task(const struct product *p, int64_t t, int64_t parts)
{
    gemm_form form = p->kernel->weight;
    int64_t e = t / parts, j = t % parts * gemm_form_cols(form);
    gemm_matrix w = member_b(p, e);
    char *to = p->packed + (size_t)e * gemm_form_bytes(form, p->cols, p->depth);
    MT_CPU(gemm_pack_columns)(form, to, &w, j, p->cols, p->depth);
}

static void compute(struct product *p, char *scratch, int threads)
{
    int64_t tasks = p->first[p->members];
    struct product packed = *p;
    if (packs(p)) packed.b = (gemm_matrix){ p->packed, p->kernel->weight, true, 1, 1 };
    int64_t parts = packs(p) ? mt_ceil_div(p->cols, gemm_form_cols(p->kernel->weight)) : 0;
    if (p->kernel->prepare) p->kernel->prepare();
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < p->members * parts; t++) pack_task(p, t, parts);
        char *mine = scratch + (size_t)omp_get_thread_num() * p->kernel->scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < tasks; t++) run_task(&packed, t, t + threads, mine);
    }
}

mt_status MT_CPU(gemm_run)(mt_stream *stream, const struct mt_gemm_args *args,
                           const gemm_kernel *kernel, const gemm_beside *beside, bool *whole)
{
    struct product p;
    int threads = stream->device->threads;
    MT_TRY(describe(&p, args, kernel));
    if (beside) p.beside = *beside;
    size_t index = ((size_t)p.members + 1) * sizeof(int64_t), bytes = 0;
    size_t tables = (2 * index + 63) / 64 * 64;
    if (packs(&p)) bytes = (size_t)p.members * gemm_form_bytes(kernel->weight, p.cols, p.depth);
    bytes = (bytes + 63) / 64 * 64;
    void *scratch;
    MT_TRY(mt_cpu_scratch(stream, &scratch, tables + bytes + (size_t)threads * kernel->scratch));
    p.start = scratch;
    p.first = p.start + p.members + 1;
    p.packed = (char *)scratch + tables;
    cut(&p, kernel->cut_for ? kernel->cut_for : threads);
    int64_t products = p.start[p.members] * p.cols * (p.height < 0 ? p.depth : p.height);
    compute(&p, p.packed + bytes, products < WORTH_THREADS ? 1 : threads);
    if (whole) *whole = p.col_parts == 1;
    return MT_OK;
}

mt_status MT_CPU(gemm)(mt_stream *stream, const struct mt_gemm_args *args)
{
    struct gemm_decoded plain;
    MT_TRY(MT_CPU(gemm_decode)(stream, &plain, args, false));
    return MT_CPU(gemm_run)(stream, &plain.args, &MT_CPU(gemm_blocks), NULL, NULL);
}
