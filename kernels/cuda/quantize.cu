/* group_quantize: tiles through load, scale, cast, store; whole-member amaxes in sweeps before. */
#include "kernels/cuda/dots.cuh"
#include "kernels/cuda/quantize_packed.cuh"
#include "kernels/cuda/quantize_rotate.cuh"
#include "kernels/cuda/quantize_tile.cuh"
#include "kernels/cuda/scratch.h"

enum { THREADS = 256 };

/* ---- sweeps over tiles ------------------------------------------------------------------------
 */

static __device__ __forceinline__ level level_of(const job &j, const tile &t, int which)
{
    const side &s = j.p.sides[which];
    const float *amax = which == SOURCE ? s.amax : j.amax[which];
    const float *given = which == SOURCE ? NULL : j.scale[which];
    return member_level(s, amax ? amax[t.index] : 0, given ? given + t.index : NULL);
}

/* Column sums of a tile's rows, in order. */
static __device__ __forceinline__ void sum_columns(const job &j, const float *x, const tile &t)
{
    int c = threadIdx.x;
    if (c >= t.cols) return;
    float sum = 0;
#pragma unroll 8
    for (int r = 0; r < t.rows; r++) sum += x[value_place(r, c)];
    j.sums[t.m.at[AT_SUMS] + t.r0 / TILE * t.m.cols + t.c0 + c] = sum;
}

template <bool HARD>
static __device__ __forceinline__ int load_tile(const job &j, space *sp, const tile &t)
{
    const side &source = j.p.sides[SOURCE];
    if (!HARD || source.plain) return load_plain(sp->x, source, t, j.nans != NULL);
    __syncthreads(); /* levels are written */
    load_quantized(sp->x, source, j.e4m3, sp->levels[SOURCE], t, SOURCE);
    __syncthreads();
    int nans = 0;
    for (int i = threadIdx.x; i < AREA; i += TILE_THREADS) nans += sp->x[i] != sp->x[i];
    return nans;
}

template <bool SR, bool HARD>
static __device__ __forceinline__ void run_tile(const job &j, space *sp, uint16_t *random,
                                                const tile &t)
{
    const side &row = j.p.sides[MT_ROW], &col = j.p.sides[MT_COL];
    bool columns = col.present && (j.codes || j.measure[MT_COL]);
    bool dequantize = HARD && columns && j.dequantized;
    if (threadIdx.x < SIDES && j.p.sides[threadIdx.x].present)
        sp->levels[threadIdx.x] = level_of(j, t, threadIdx.x);
    int nans = load_tile<HARD>(j, sp, t);
    if (SR && random) draw_tile(random, j, t);
    __syncthreads();
    const source_of_bits bits = { random, j, t };
    raise_nans(j, t.index, nans);
    if (j.codes && j.sums) sum_columns(j, sp->x, t);
    if (dequantize) __syncthreads(); /* the row direction leaves its values in x */
    if (row.present && (j.codes || j.measure[MT_ROW] || dequantize)) {
        bool write = j.codes && j.write[MT_ROW], make = (j.codes || dequantize) && !row.plain;
        if (make || j.measure[MT_ROW]) run_direction<MT_ROW, SR, HARD>(j, sp, bits, t, make, write);
        if (row.plain && write) store_plain(row, sp->x, t);
    }
    if (!columns) return;
    if (dequantize || col.options.rht) __syncthreads(); /* x is about to change, or has changed */
    if (col.options.rht) rotate_tile(sp->x, t, col.options.rht_mask);
    bool write = j.codes && j.write[MT_COL], make = j.codes && !col.plain;
    if (make || j.measure[MT_COL]) run_direction<MT_COL, SR, HARD>(j, sp, bits, t, make, write);
    if (col.plain && write) store_plain(col, sp->x, t);
}

/* Bytes of shared memory before the random bits; theirs, where they have room. */
static __host__ __device__ constexpr size_t space_bytes(bool hard)
{
    return hard ? sizeof(space) : offsetof(space, errors);
}
static __host__ __device__ __forceinline__ size_t bits_bytes(const job &j, bool hard)
{
    const size_t bits = AREA * sizeof(uint16_t);
    return space_bytes(hard) + bits <= (size_t)j.shared ? bits : 0;
}

template <bool SR, bool HARD>
static __global__ void __launch_bounds__(TILE_THREADS, SR || HARD ? 2 : 3)
    tile_kernel(const __grid_constant__ job j)
{
    extern __shared__ uint4 mt_shared[];
    space *sp = (space *)mt_shared;
    uint16_t *random =
        bits_bytes(j, HARD) ? (uint16_t *)((char *)mt_shared + space_bytes(HARD)) : NULL;
    int64_t units = j.p.units[j.p.group.members];
    if (threadIdx.x == 0 && blockIdx.x < units) sp->tiles[0] = tile_at(j.p, blockIdx.x);
    __syncthreads();
    int k = 0;
    for (int64_t u = blockIdx.x; u < units; u += gridDim.x, k ^= 1) {
        if (threadIdx.x == 0 && u + gridDim.x < units)
            sp->tiles[k ^ 1] = tile_at(j.p, u + gridDim.x);
        run_tile<SR, HARD>(j, sp, random, sp->tiles[k]);
        __syncthreads(); /* the tile is done with */
    }
}

/* ---- members ----------------------------------------------------------------------------------
 */

/* Scales of swizzled tiles are written one by one, over zeros. */
static __global__ void clear_kernel(uint8_t *scales, const member *totals, int which)
{
    int64_t bytes = totals->at[AT_SCALES + which],
            vectors = (uintptr_t)scales % 16 ? 0 : bytes / 16;
    MT_GRID_STRIDE(i, vectors)((uint4 *)scales)[i] = make_uint4(0, 0, 0, 0);
    MT_GRID_STRIDE(i, bytes - vectors * 16) scales[vectors * 16 + i] = 0;
}

static __global__ void members_kernel(const __grid_constant__ job j)
{
    let_follow();
    wait_for_results();
    MT_GRID_STRIDE(i, j.p.group.members) give_results(j, i);
}

/* ---- the host's part --------------------------------------------------------------------------
 */

/* The call while it is put together. */
struct call {
    const struct mt_quantize_args *args;
    job j;
    bool known[MT_DIR_COUNT]; /* amax is final */
    unsigned long long *nans;
    bool hard;
    bool makes;     /* the sweep that measures makes the source, in the call's scratch */
    bool given;     /* the results of members */
    void *of_token; /* what measuring gathered rows takes */
};

static call call_of(const mt_stream *stream, const struct mt_quantize_args *args)
{
    call c = {};
    c.args = args, c.j.p.group = args->src->group, c.j.shared = mt_cuda_block_shared(stream);
    return c;
}

/* F's overflow value: the largest finite value of the type that is quantized. */
static float largest_of(const side *source)
{
    if (source->plain && source->dtype == MT_BF16) return 0x1.fep127f;
    if (source->plain && source->dtype == MT_F16) return 65504.0f;
    return FLT_MAX;
}

static void set_sides(call *c)
{
    const struct mt_quantize_args *a = c->args;
    job *j = &c->j;
    j->row_token = a->row_token, j->row_weight = a->row_token ? (const float *)a->weights : NULL;
    j->rows_used = a->rows_used, j->swiglu = a->swiglu;
    j->z = c->makes ? NULL : (const mt_bf16 *)a->z;
    side *sides = j->p.sides;
    const mt_qtensor made = mt_qtensor_plain(a->src->group, a->dtype, a->scratch);
    const mt_direction *source = c->makes ? &made.dir[MT_ROW] : &a->src->dir[a->src_dir];
    mt_direction row = a->out->dir[MT_ROW], col = a->out->dir[MT_COL];
    j->dequantized = col.format && col.options.from_dequantized;
    if (j->dequantized && !row.format) { /* the row direction that the column's values come from */
        row = mt_direction();
        row.format = col.format, row.options = col.options;
        row.options.rht = row.options.from_dequantized = false;
    }
    sides[MT_ROW] = mt_cuda_side_of(&row, MT_ROW, false);
    sides[MT_COL] = mt_cuda_side_of(&col, MT_COL, false);
    sides[SOURCE] = mt_cuda_side_of(source, c->makes ? MT_ROW : a->src_dir, true);
    float overflow = largest_of(&sides[SOURCE]);
    sides[MT_ROW].overflow = overflow;
    sides[MT_COL].overflow = j->dequantized ? FLT_MAX : overflow;
    c->hard = !sides[SOURCE].plain || j->dequantized;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const mt_direction *d = &a->out->dir[dir];
        const mt_format_options *options = &sides[dir].options;
        j->write[dir] = d->format && d->codes != source->codes;
        c->known[dir] = d->format && a->pass == MT_QUANTIZE_CODES;
        c->hard |= sides[dir].square || sides[dir].decoded ||
                   (sides[dir].present && options->four_over_six);
        j->scale[dir] = a->scale[dir];
    }
    if (sides[MT_COL].plain && col.codes == row.codes) j->write[MT_COL] = false;
}

static size_t rounded(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* Bytes of what begins at 0: a count of blocks, NaNs and amaxes. */
static size_t zero_bytes(const mt_group *g)
{
    size_t n = (size_t)g->members;
    return sizeof *job().blocks_done + n * sizeof(int64_t) + MT_DIR_COUNT * n * sizeof(float);
}

/* Whether the bias gradient is a sweep of its own: sweeps that keep bytes decoded leave no sums. */
static bool sums_apart(const struct mt_quantize_args *a)
{
    const mt_direction *source = &a->src->dir[a->src_dir];
    if (!a->bias_grad || a->pass == MT_QUANTIZE_AMAX || a->row_token || a->swiglu || a->z ||
        source->format != mt_format_plain(MT_BF16) || a->src->group.last_dims)
        return false;
    bool any = false;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const mt_direction *d = &a->out->dir[dir];
        any |= d->format && d->layout == MT_LAYOUT_DECODED && !d->format->second_level;
    }
    return any;
}

static size_t sums_bytes(const struct mt_quantize_args *a)
{
    const mt_group *g = &a->src->group;
    return a->bias_grad && !sums_apart(a)
               ? rounded((size_t)mt_cuda_plan_blocks(g, TILE, 1) * sizeof(float))
               : 0;
}

/* Bytes for the most strips that there may be. */
static size_t strips_bytes(const struct mt_quantize_args *a)
{
    const mt_group *g = &a->src->group;
    return a->pass == MT_QUANTIZE_AMAX || g->last_dims
               ? 0
               : rounded(mt_cuda_strip_bytes(mt_cuda_plan_strips(g, TILE)));
}

/* bf16 whose rows begin at multiples of 16 bytes, to what the short way knows. Where nvfp4
 * sweeps twice, SwiGLU is an op of its own: made once. */
static bool fuses(const mt_stream *stream, const struct mt_quantize_args *args)
{
    call c = call_of(stream, args);
    set_sides(&c);
    c.j.codes = true, c.j.sums = args->bias_grad;
    const side *sides = c.j.p.sides;
    if (args->swiglu && (sides[MT_ROW].second_level || sides[MT_COL].second_level)) return false;
    if (args->swiglu && sides[MT_COL].present && c.j.shared < mt_cuda_swiglu_bytes()) return false;
    return mt_cuda_short_suffices(&c.j) && args->src->group.k % 8 == 0 &&
           (uintptr_t)c.j.p.sides[SOURCE].codes % 16 == 0;
}

/* Whether codes need the member's amax before them. */
static bool needs_amax(const side *s)
{
    return s->present && ((s->whole && !s->delayed) || s->second_level);
}

/* Tiles keep one direction decoded, other ways both, or one beside codes, if they know the sweep
 * over codes. */
static bool is_apart(const call *c)
{
    job sweep = c->j;
    const side *row = &sweep.p.sides[MT_ROW], *col = &sweep.p.sides[MT_COL];
    sweep.codes = c->args->pass != MT_QUANTIZE_AMAX, sweep.sums = c->args->bias_grad;
    return row->present && col->present && (row->decoded || col->decoded) &&
           !mt_cuda_short_suffices(&sweep) && !mt_cuda_masters_suffice(&sweep) &&
           !mt_cuda_master_nibbles_suffice(&sweep, c->args);
}

/* Gradients of SwiGLU that strands measure, which can make them: in the call's scratch, if it has
 * one. */
static bool makes_source(const mt_stream *stream, const struct mt_quantize_args *args)
{
    call c = call_of(stream, args);
    const uintptr_t lines = (uintptr_t)args->z | (uintptr_t)args->scratch |
                            (uintptr_t)args->src->dir[args->src_dir].codes;
    if (!args->z || !args->scratch || args->pass != MT_QUANTIZE_ALL || args->bias_grad ||
        args->src->group.k % 16 || lines % 16)
        return false;
    c.makes = true;
    set_sides(&c);
    return mt_cuda_short_suffices(&c.j) && needs_amax(&c.j.p.sides[MT_COL]) &&
           mt_cuda_rotated_suffices(&c.j) && !is_apart(&c);
}

extern "C" size_t mt_cuda_quantize_scratch(const mt_stream *stream,
                                           const struct mt_quantize_args *a)
{
    const mt_group *g = &a->src->group;
    const bool made = (a->row_token || a->z) && (fuses(stream, a) || makes_source(stream, a));
    size_t tokens = made && a->row_token ? (size_t)a->tokens * MT_CUDA_FOUND : 0;
    size_t parts = !made          ? 0
                   : a->dweights  ? (size_t)mt_dot_parts(g->k / 2)
                   : a->row_token ? a->weights != NULL
                                  : 0;
    return g->members
               ? rounded(mt_cuda_plan_bytes(g)) + rounded(zero_bytes(g)) + sums_bytes(a) +
                     strips_bytes(a) + tokens + (size_t)mt_cuda_plan_rows(g) * parts * sizeof(float)
               : 0;
}

/* Lays the call's arrays out in scratch; amaxes and counts begin at 0. */
static mt_status take_scratch(call *c, mt_stream *stream)
{
    const struct mt_quantize_args *a = c->args;
    const mt_group *g = &c->j.p.group;
    size_t members = rounded(mt_cuda_plan_bytes(g)), zeros = zero_bytes(g);
    size_t amax = (size_t)g->members * sizeof(float), nans = (size_t)g->members * sizeof(int64_t);
    char *p;
    MT_TRY(mt_cuda_scratch(stream, (void **)&p, mt_cuda_quantize_scratch(stream, a)));
    mt_cuda_plan_place(&c->j.p, p), p += members;
    c->j.p.zeros = (uint64_t *)p;
    c->j.p.zero_count = (int64_t)((zeros + 7) / 8);
    c->j.sums = a->bias_grad ? (float *)(p + rounded(zeros)) : NULL;
    char *strips = p + rounded(zeros) + sums_bytes(a);
    c->of_token = strips + strips_bytes(a);
    if (c->j.row_weight) c->j.row_weight = (float *)c->of_token + 2 * a->tokens;
    if (a->dweights) c->j.dots = (float *)c->of_token;
    job sweep = c->j;
    sweep.codes = a->pass != MT_QUANTIZE_AMAX;
    if (mt_cuda_short_suffices(&sweep) && mt_cuda_rotated_suffices(&sweep))
        sweep.p.sides[MT_COL].present = false;
    const bool nvfp4 = mt_cuda_nvfp4_suffices(&sweep) || mt_cuda_chosen_suffices(&sweep);
    const bool bytes = mt_cuda_bytes_suffice(&sweep) || mt_cuda_gathered_suffice(&sweep) ||
                       (sweep.codes && mt_cuda_values_suffice(&sweep));
    const bool in_strips = nvfp4 || (bytes && !mt_cuda_tokens_suffice(&sweep, a));
    const bool masters = mt_cuda_masters_suffice(&c->j) || mt_cuda_master_nibbles_suffice(&c->j, a);
    c->j.gives = a->pass == MT_QUANTIZE_ALL && !needs_amax(&c->j.p.sides[MT_ROW]) &&
                 !needs_amax(&c->j.p.sides[MT_COL]) && !nvfp4 &&
                 (masters || (in_strips && !mt_cuda_gathered_suffice(&sweep)));
    if (in_strips) {
        c->j.table.strips = (strip *)strips;
        c->j.table.gathered = c->j.row_token || c->j.z, c->j.table.swiglu = a->swiglu;
        c->j.table.rows = nvfp4 ? (int)MT_CUDA_NVFP4_ROWS : mt_cuda_bytes_rows(stream, &sweep);
        c->j.table.wide = nvfp4 ? 1 : mt_cuda_bytes_wide(stream, &sweep);
        c->j.table.most = mt_cuda_plan_strips(g, c->j.table.rows);
    }
    c->j.blocks_done = (unsigned long long *)p, p += sizeof *c->j.blocks_done;
    c->nans = c->j.gives && a->nan ? (unsigned long long *)a->nan : (unsigned long long *)p;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        float *given = a->out->dir[dir].amax;
        c->j.amax[dir] = (float *)(p + nans + (size_t)dir * amax);
        if ((c->known[dir] || c->j.gives) && given) c->j.amax[dir] = given;
    }
    return MT_OK;
}

static mt_status make_source(const call *c, mt_stream *stream)
{
    const struct mt_quantize_args *a = c->args;
    job sweep = c->j;
    sweep.z = (const mt_bf16 *)a->z;
    sweep.da = (const mt_bf16 *)a->src->dir[a->src_dir].codes;
    return mt_cuda_quantize_strands(stream, &sweep);
}

template <bool SR, bool HARD>
static mt_status launch_tiles(mt_stream *stream, const job *j, unsigned blocks)
{
    const size_t bytes = space_bytes(HARD) + (SR ? bits_bytes(*j, HARD) : 0);
    MT_TRY(
        mt_cuda_give_shared(stream, (const void *)tile_kernel<SR, HARD>, bytes, "quantize: tiles"));
    tile_kernel<SR, HARD><<<blocks, TILE_THREADS, bytes, mt_cuda_stream(stream)>>>(*j);
    MT_LAUNCHED(stream, "quantize: tiles");
    return MT_OK;
}

/* One sweep over the source; `nans`: the first, which counts them. */
static mt_status run_sweep(call *c, mt_stream *stream, bool measure_row, bool measure_col,
                           bool codes, bool *nans)
{
    enum { PER_MULTIPROCESSOR = 12 }; /* of which 2, 3 or 4 are resident */
    const side *row = &c->j.p.sides[MT_ROW], *col = &c->j.p.sides[MT_COL];
    int64_t units = mt_cuda_plan_units(&c->j.p.group);
    int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * PER_MULTIPROCESSOR;
    unsigned blocks = (unsigned)(units < most ? units : most);
    bool counting = c->args->nan || (c->args->running_nan && c->args->pass != MT_QUANTIZE_AMAX);
    c->j.measure[MT_ROW] = measure_row, c->j.measure[MT_COL] = measure_col, c->j.codes = codes;
    c->j.nans = *nans && counting ? c->nans : NULL;
    *nans = false;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) c->known[dir] |= c->j.measure[dir];
    if (blocks == 0) return MT_OK;
    bool changed = measure_col && (col->options.rht || c->j.dequantized);
    if (!codes && c->makes) return make_source(c, stream);
    if (!codes && !changed && (c->j.row_token || c->j.swiglu || c->j.z))
        return mt_cuda_measure_made(stream, &c->j, c->args->tokens, c->of_token);
    if (!codes && !changed && c->j.p.sides[SOURCE].plain)
        return mt_cuda_quantize_measure(stream, &c->j, blocks);
    if (codes && mt_cuda_tokens_suffice(&c->j, c->args))
        return mt_cuda_quantize_tokens(stream, &c->j, c->args);
    if (codes && mt_cuda_masters_suffice(&c->j)) {
        c->given = c->j.gives;
        return mt_cuda_quantize_masters(stream, &c->j);
    }
    if (mt_cuda_short_suffices(&c->j)) {
        c->given = codes && (!c->j.table.strips || c->j.gives || mt_cuda_bytes_give(&c->j));
        return mt_cuda_quantize_short(stream, &c->j);
    }
    if (codes && mt_cuda_master_nibbles_suffice(&c->j, c->args)) {
        c->given = c->j.gives;
        return mt_cuda_quantize_master_nibbles(stream, &c->j);
    }
    if (codes && mt_cuda_rows_suffice(&c->j)) return mt_cuda_quantize_rows(stream, &c->j, blocks);
    if (codes && col->padded) { /* tiles write no more than their codes */
        const mt_group *g = &c->j.p.group;
        MT_CUDA(cudaMemsetAsync(col->codes, 0, (size_t)(mt_padded_rows(g) * g->k),
                                mt_cuda_stream(stream)));
    }
    bool draws = (row->present && row->options.sr) || (col->present && col->options.sr);
    draws = draws && (codes || (measure_col && c->j.dequantized));
    return draws     ? launch_tiles<true, true>(stream, &c->j, blocks)
           : c->hard ? launch_tiles<false, true>(stream, &c->j, blocks)
                     : launch_tiles<false, false>(stream, &c->j, blocks);
}

static mt_status run_sweeps(call *c, mt_stream *stream)
{
    const side *row = &c->j.p.sides[MT_ROW], *col = &c->j.p.sides[MT_COL];
    bool all = c->args->pass == MT_QUANTIZE_AMAX, nans = true;
    bool want_row = row->present && !c->known[MT_ROW] && (all || needs_amax(row));
    bool want_col = col->present && !c->known[MT_COL] && (all || needs_amax(col));
    bool direct = want_col && !c->j.dequantized;
    if (want_row || direct) MT_TRY(run_sweep(c, stream, want_row, direct, false, &nans));
    if (want_col && !direct) MT_TRY(run_sweep(c, stream, false, true, false, &nans));
    if (all) return MT_OK;
    return run_sweep(c, stream, row->present && !c->known[MT_ROW],
                     col->present && !c->known[MT_COL], true, &nans);
}

static void set_results(call *c)
{
    const struct mt_quantize_args *a = c->args;
    bool codes = a->pass != MT_QUANTIZE_AMAX;
    results *out = &c->j.out;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const mt_direction *d = &a->out->dir[dir];
        if (!d->format) continue;
        out->amax[dir] = a->pass == MT_QUANTIZE_CODES ? NULL : d->amax;
        out->running[dir] = a->running_amax[dir];
        out->scales[dir] = codes && c->j.p.sides[dir].whole;
    }
    out->nan = a->nan, out->running_nan = codes ? a->running_nan : NULL, out->nans = c->nans;
}

static mt_status write_members(call *c, mt_stream *stream)
{
    int64_t n = c->j.p.group.members;
    if (c->given) return MT_OK;
    MT_TRY(follow(stream, members_kernel, mt_blocks(stream, n, THREADS), THREADS, 0, c->j));
    MT_LAUNCHED(stream, "quantize: members");
    return MT_OK;
}

static mt_status weigh_dots(const call *c, mt_stream *stream)
{
    const struct mt_quantize_args *a = c->args;
    const struct mt_weights_bwd_args to = { .dtype = a->dtype,
                                            .tokens = a->tokens,
                                            .width = a->src->group.k / 2,
                                            .top_k = a->top_k,
                                            .dweights = a->dweights,
                                            .dz = NULL, /* it was not stored */
                                            .z = a->z,
                                            .weights = a->weights,
                                            .position = a->position };
    return mt_cuda_weights_of_dots(stream, &to, c->j.dots);
}

extern "C" bool mt_cuda_quantize_fuses(mt_stream *stream, const struct mt_quantize_args *args)
{
    return fuses(stream, args);
}

/* Each direction by itself; what is the source's is taken once. */
static mt_status quantize_apart(mt_stream *stream, const struct mt_quantize_args *args)
{
    struct mt_quantize_args part = *args;
    MT_REQUIRE(!args->out->dir[MT_COL].options.from_dequantized, MT_EUNSUPPORTED,
               "quantize: source=dequantized takes the codes of rows, beside which nothing is kept "
               "decoded");
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
        const mt_qtensor one = mt_qtensor_select(args->out, (mt_dir)dir);
        part.out = &one;
        MT_TRY(mt_cuda_quantize(stream, &part));
        part.nan = part.running_nan = NULL, part.bias_grad = NULL;
    }
    return MT_OK;
}

/* The same of the bias gradient and the rest. */
static mt_status quantize_summed(mt_stream *stream, const struct mt_quantize_args *args)
{
    const mt_qtensor dy =
        mt_qtensor_plain(args->src->group, MT_BF16, args->src->dir[args->src_dir].codes);
    const struct mt_bias_grad_args sums = {
        .dtype = MT_BF16, .dy = &dy, .accumulate = args->accumulate, .db = args->bias_grad
    };
    struct mt_quantize_args rest = *args;
    rest.bias_grad = NULL;
    MT_TRY(mt_cuda_bias_grad_bf16(stream, &sums));
    return mt_cuda_quantize(stream, &rest);
}

extern "C" bool mt_cuda_quantize_decodes(const mt_format_spec *spec)
{
    const mt_format_options *o = &spec->options;
    if (o->two_d || o->four_over_six || o->from_dequantized) return false;
    if (spec->format->second_level) return o->element == MT_ELEMENT_E2M1;
    return (o->element == MT_ELEMENT_E4M3 || o->element == MT_ELEMENT_E5M2) && !o->sr && !o->rht &&
           mt_format_spec_fits_bf16(spec);
}

extern "C" mt_status mt_cuda_quantize(mt_stream *stream, const struct mt_quantize_args *args)
{
    call c = call_of(stream, args);
    if (sums_apart(args)) return quantize_summed(stream, args);
    if ((args->row_token || args->swiglu || args->z) && !mt_cuda_quantize_fuses(stream, args)) {
        if (!makes_source(stream, args)) return mt_quantize_parts(stream, args);
        MT_REQUIRE(args->scratch || mt_group_capacity(&args->src->group) == 0, MT_EINVAL,
                   "quantize: scratch is NULL");
        c.makes = true;
    }
    c.j.e4m3 = mt_codec_of(MT_ELEMENT_E4M3);
    c.j.key[0] = args->seed, c.j.key[1] = args->stream, c.j.step = args->step;
    c.j.first_step = args->first_step;
    c.j.first_member = args->first_member, c.j.first_row = args->first_row;
    if (c.j.p.group.members == 0) return args->dweights ? weigh_dots(&c, stream) : MT_OK;
    set_sides(&c);
    if (is_apart(&c)) return quantize_apart(stream, args);
    MT_TRY(take_scratch(&c, stream));
    set_results(&c);
    if (c.j.row_weight)
        MT_TRY(mt_cuda_weigh_rows(stream, (float *)c.j.row_weight, (const float *)args->weights,
                                  args->position, args->tokens * args->top_k));
    MT_TRY(mt_cuda_plan_job(stream, &c.j));
    unsigned wide = (unsigned)mt_cuda_multiprocessors(stream) * 4;
    for (int dir = 0; dir < MT_DIR_COUNT && args->pass != MT_QUANTIZE_AMAX; dir++) {
        const side *s = &c.j.p.sides[dir];
        if (!c.j.write[dir] || !s->swizzled) continue;
        clear_kernel<<<wide, THREADS, 0, mt_cuda_stream(stream)>>>(
            s->scales, c.j.p.members + c.j.p.group.members, dir);
        MT_LAUNCHED(stream, "quantize: padding of scales");
    }
    MT_TRY(run_sweeps(&c, stream));
    MT_TRY(write_members(&c, stream));
    if (args->dweights && args->pass != MT_QUANTIZE_AMAX) MT_TRY(weigh_dots(&c, stream));
    if (!args->bias_grad || args->pass == MT_QUANTIZE_AMAX) return MT_OK;
    return mt_cuda_quantize_bias(stream, &c.j, args->bias_grad, args->accumulate);
}
