/* Gradient norm and AdamW. Here mt_real is the dtype of masters, gradients and moments. */
#include "kernels/cpu/backend.h"
#include "kernels/cpu/stored.h"

enum { NORM_BLOCK = 4096, LANES = 16, SERIAL = 16384 };

/* Sum of squares of a block: lane l adds elements l, l + LANES, ... in order; then the lanes in
 * pairs, l with l + 8, 4, 2, 1. Missing elements of the last block count as 0. The same bits in
 * every kernel set. */
static double block_squares(const mt_real *restrict g, int64_t n)
{
    double lane[LANES] = { 0 };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) lane[l] += (double)g[i + l] * (double)g[i + l];
    for (int l = 0; i < n; i++, l++) lane[l] += (double)g[i] * (double)g[i];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lane[l] += lane[l + half];
    return lane[0];
}

/* The same of block `at` of all: those of bf16 come last. */
static double squares_at(const struct mt_grad_norm_args *a, int64_t at)
{
    int64_t blocks = mt_ceil_div(a->count, NORM_BLOCK), first = at * NORM_BLOCK;
    if (at < blocks)
        return block_squares((const mt_real *)a->grad + first,
                             mt_min(NORM_BLOCK, a->count - first));
    mt_real wide[NORM_BLOCK];
    first -= blocks * NORM_BLOCK;
    int64_t n = mt_min(NORM_BLOCK, a->bf16_count - first);
    for (int64_t i = 0; i < n; i++) wide[i] = (mt_real)mt_bf16_to_f32(a->bf16_grad[first + i]);
    return block_squares(wide, n);
}

/* What a norm means for the step: how much to clip, whether to skip, and the bias corrections. */
static void finish_norm(const struct mt_grad_norm_args *a, double norm)
{
    struct mt_step_state *s = a->state;
    double clip = a->max_norm > 0 ? a->max_norm / (norm + 1e-6) : 1;
    s->grad_norm = norm;
    s->clip = clip < 1 ? clip : 1;
    s->skip = !isfinite(norm) || (a->loss && !isfinite(*(const mt_real *)a->loss));
    if (s->skip) {
        s->skipped++, s->skipped_in_a_row++;
        return;
    }
    s->power1 *= a->beta1, s->power2 *= a->beta2;
    s->bias1 = 1 - s->power1, s->bias2 = 1 - s->power2;
    s->applied++, s->skipped_in_a_row = 0;
}

mt_status MT_CPU(grad_norm)(mt_stream *stream, const struct mt_grad_norm_args *a)
{
    int64_t blocks = mt_ceil_div(a->count, NORM_BLOCK) + mt_ceil_div(a->bf16_count, NORM_BLOCK);
    void *scratch;
    if (a->pass == MT_NORM_FINISH) {
        finish_norm(a, sqrt(*a->sum));
        return MT_OK;
    }
    MT_TRY(mt_cpu_scratch(stream, &scratch, (size_t)blocks * sizeof(double)));
    double *partial = scratch, sum = 0;
#pragma omp parallel for num_threads(stream->device->threads) schedule(static) if (blocks > 8)
    for (int64_t i = 0; i < blocks; i++) partial[i] = squares_at(a, i);
    for (int64_t first = 0; first < blocks; first += MT_NORM_RUN) {
        double run = 0;
        for (int64_t i = first; i < mt_min(blocks, first + MT_NORM_RUN); i++) run += partial[i];
        sum += run;
    }
    if (a->pass == MT_NORM_SUM)
        *a->sum = sum;
    else
        finish_norm(a, sqrt(sum));
    return MT_OK;
}

/* What is the same for every element, rounded to real once. */
struct adam {
    mt_real beta1, beta2, rest1, rest2, bias1, bias2, eps, decay, lr, clip;
};

static void adam_block(mt_real *restrict p, mt_real *restrict m, mt_real *restrict v,
                       const mt_real *restrict grad, int64_t n, struct adam c)
{
    for (int64_t i = 0; i < n; i++) {
        mt_real g = grad[i] * c.clip;
        m[i] = c.beta1 * m[i] + c.rest1 * g;
        v[i] = c.beta2 * v[i] + (c.rest2 * g) * g;
#if MT_ELEM_BITS == 64
        mt_real root = sqrt(v[i] / c.bias2);
#else
        mt_real root = sqrtf(v[i] / c.bias2);
#endif
        mt_real u = (m[i] / c.bias1) / (root + c.eps);
        p[i] = p[i] - c.lr * (u + c.decay * p[i]);
    }
}

/* Opens what a block of the update is about, updates it, stores it. The last array is the gradient,
 * which is only read. */
enum { MASTER, FIRST, SECOND, GRADIENT, ARRAYS };
static void update_block(const struct stored arrays[ARRAYS],
                         const struct stored_form *const forms[ARRAYS], uint16_t *cast, int64_t at,
                         int64_t n, struct adam c)
{
    mt_real room[ARRAYS][STORED_BLOCK], *x[ARRAYS];
    for (int i = 0; i < ARRAYS; i++) x[i] = forms[i]->open(&arrays[i], room[i], at, n);
    adam_block(x[MASTER], x[FIRST], x[SECOND], x[GRADIENT], n, c);
    for (int i = 0; i < GRADIENT; i++) forms[i]->close(&arrays[i], x[i], at, n);
    for (int64_t i = 0; cast && i < n; i++) cast[at + i] = mt_f32_to_bf16((float)x[MASTER][i]);
}

static void update_param(mt_stream *stream, const struct mt_adamw_args *a)
{
    const struct mt_step_state *s = a->state;
    struct adam c = {
        .beta1 = (mt_real)a->beta1,
        .beta2 = (mt_real)a->beta2,
        .rest1 = (mt_real)(1 - a->beta1),
        .rest2 = (mt_real)(1 - a->beta2),
        .bias1 = (mt_real)s->bias1,
        .bias2 = (mt_real)s->bias2,
        .eps = (mt_real)a->eps,
        .decay = (mt_real)a->decay,
        .lr = (mt_real)s->lr,
        .clip = (mt_real)s->clip,
    };
    struct stored draws = { .seed = a->seed, .first = a->first, .step = (uint32_t)s->applied };
    struct stored arrays[ARRAYS] = { draws, draws, draws, draws };
    arrays[MASTER].codes = a->p, arrays[MASTER].beside = a->p_low;
    arrays[FIRST].codes = a->m, arrays[FIRST].beside = a->m_scales;
    arrays[SECOND].codes = a->v, arrays[SECOND].beside = a->v_scales;
    arrays[FIRST].stream = 2 * a->param, arrays[SECOND].stream = 2 * a->param + 1;
    arrays[GRADIENT].codes = (void *)(uintptr_t)a->grad;
    const struct stored_form *moments = moment_forms[a->moments][a->stochastic];
    const struct stored_form *forms[ARRAYS] = { &master_forms[a->master], &moments[0], &moments[1],
                                                &gradient_forms[a->grad_bf16] };
#pragma omp parallel for num_threads(stream->device->threads)                                      \
    schedule(static) if (a->count > SERIAL)
    for (int64_t i = 0; i < a->count; i += STORED_BLOCK)
        update_block(arrays, forms, a->cast, i, mt_min(STORED_BLOCK, a->count - i), c);
}

mt_status MT_CPU(adamw)(mt_stream *stream, const struct mt_adamw_args *args)
{
    if (args->state->skip) return MT_OK;
    for (const struct mt_adamw_args *a = args; a; a = a->next) update_param(stream, a);
    return MT_OK;
}

mt_status MT_CPU(join_master)(mt_stream *stream, const struct mt_join_master_args *a)
{
#if MT_ELEM_BITS == 32
#pragma omp parallel for num_threads(stream->device->threads)                                      \
    schedule(static) if (a->count > SERIAL)
    for (int64_t i = 0; i < a->count; i += STORED_BLOCK)
        join_halves(a->y + i, a->high + i, a->low + i, mt_min(STORED_BLOCK, a->count - i));
#else
    (void)stream, (void)a;
#endif
    return MT_OK;
}
