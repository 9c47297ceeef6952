/* Known answers, and a grouped GEMM against the plain sum. */
#include "train/selfcheck.h"

#include <math.h>
#include <stdlib.h>

#include "core/rng.h"
#include "layers/functional.h"

mt_status mt_selfcheck_philox(void)
{
    /* kat_vectors of Random123 (Salmon et al.) */
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } known[] = {
        { { 0, 0, 0, 0 }, { 0, 0 }, { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } },
        { { ~0u, ~0u, ~0u, ~0u },
          { ~0u, ~0u },
          { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd } },
        { { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 },
          { 0xa4093822, 0x299f31d0 },
          { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 } },
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint32_t got[4];
        mt_philox(got, known[i].counter, known[i].key);
        for (int j = 0; j < 4; j++)
            MT_REQUIRE(got[j] == known[i].want[j], MT_EINTERNAL,
                       "philox: word %d of vector %zu is %08x, must be %08x", j, i,
                       (unsigned)got[j], (unsigned)known[i].want[j]);
    }
    return MT_OK;
}

/* ---- grouped GEMM ------------------------------------------------------------------------------
 */

/* Sizes that no tile divides: x [ROWS, IN], dy [ROWS, OUT], w [MEMBERS, OUT, IN]. */
enum { MEMBERS = 3, ROWS = 41, IN = 67, OUT = 35, X = ROWS * IN, DY = ROWS * OUT };
enum { W = MEMBERS * OUT * IN };
static const int64_t first_row[MEMBERS + 1] = { 0, 13, 13, ROWS };

struct problem {
    mt_device *device;
    mt_stream stream;
    mt_dtype dtype, real;
    double x[X], dy[DY], w[W]; /* host values, as dtype holds them */
    mt_param_store *store;
    mt_param *weight;
    /* device memory: counts, offsets of widths IN and OUT; x and dy of dtype; y, dx of real */
    int64_t *shape;
    void *rows, *results;
};

enum {
    SHAPE_BYTES = (MEMBERS + 2 * (MEMBERS + 1)) * sizeof(int64_t),
    ROWS_BYTES = (X + DY) * sizeof(double),
    RESULT_BYTES = (X + DY) * sizeof(double)
};

static void *element(void *base, mt_dtype dtype, int64_t i)
{
    return (char *)base + (size_t)i * mt_dtype_size(dtype);
}

/* Uniform in [-1, 1), rounded to dtype, into host doubles and device memory of type `to`. */
static mt_status fill(struct problem *p, double *host, int64_t count, void *device, mt_dtype to,
                      uint32_t stream)
{
    double raw[W]; /* the longest of the three */
    for (int64_t i = 0; i < count; i++) {
        mt_store_f64(raw, p->dtype, 0, 2 * mt_rng_uniform(1, stream, (uint64_t)i) - 1);
        host[i] = mt_load_f64(raw, p->dtype, 0);
    }
    for (int64_t i = 0; i < count; i++) mt_store_f64(raw, to, i, host[i]);
    return mt_device_copy(p->device, device, raw, (size_t)count * mt_dtype_size(to));
}

static mt_status make_weight(struct problem *p)
{
    MT_TRY(mt_param_store_create(&p->store, p->device, p->real, p->dtype));
    MT_TRY(mt_param_store_add(
        p->store, &p->weight,
        &(mt_param_spec){
            .name = "selfcheck", .members = MEMBERS, .m = OUT, .k = IN, .packed = true }));
    MT_TRY(mt_linear_reserve(p->weight, p->device, NULL));
    MT_TRY(mt_param_store_allocate(p->store, true));
    MT_TRY(mt_linear_place(p->weight, p->device));
    MT_TRY(fill(p, p->w, W, p->weight->master, p->real, 0));
    return mt_linear_refresh(p->weight, &p->stream);
}

static mt_status make(struct problem *p)
{
    void *shape = NULL;
    int64_t host[MEMBERS + 2 * (MEMBERS + 1)];
    for (int64_t i = 0; i <= MEMBERS; i++) {
        if (i < MEMBERS) host[i] = first_row[i + 1] - first_row[i];
        host[MEMBERS + i] = first_row[i] * IN;
        host[2 * MEMBERS + 1 + i] = first_row[i] * OUT;
    }
    MT_TRY(make_weight(p));
    MT_TRY(mt_device_alloc(p->device, &shape, SHAPE_BYTES, MT_MEMORY_STATE));
    p->shape = shape;
    MT_TRY(mt_device_alloc(p->device, &p->rows, ROWS_BYTES, MT_MEMORY_STATE));
    MT_TRY(mt_device_alloc(p->device, &p->results, RESULT_BYTES, MT_MEMORY_STATE));
    MT_TRY(mt_device_copy(p->device, p->shape, host, SHAPE_BYTES));
    MT_TRY(fill(p, p->x, X, p->rows, p->dtype, 1));
    return fill(p, p->dy, DY, element(p->rows, p->dtype, X), p->dtype, 2);
}

static void release(struct problem *p)
{
    void *shape = p->shape;
    mt_param_store_destroy(&p->store);
    mt_device_free(p->device, &shape, SHAPE_BYTES, MT_MEMORY_STATE);
    mt_device_free(p->device, &p->rows, ROWS_BYTES, MT_MEMORY_STATE);
    mt_device_free(p->device, &p->results, RESULT_BYTES, MT_MEMORY_STATE);
}

/* y into results, dx behind it, dw into the param's gradient. */
static mt_status multiply(struct problem *p)
{
    mt_group gx = mt_group_ragged_rows(MEMBERS, ROWS, IN, p->shape, p->shape + MEMBERS);
    mt_group gdy = mt_group_ragged_rows(MEMBERS, ROWS, OUT, p->shape, p->shape + 2 * MEMBERS + 1);
    mt_qtensor x = mt_qtensor_plain(gx, p->dtype, p->rows);
    mt_qtensor dy = mt_qtensor_plain(gdy, p->dtype, element(p->rows, p->dtype, X));
    const struct mt_gemm_args passes[MT_GEMM_LAYOUT_COUNT] = {
        [MT_GEMM_TN] = { .a = &p->weight->weight, .b = &x, .d = p->results },
        [MT_GEMM_NN] = { .a = &p->weight->weight, .b = &dy, .d = element(p->results, p->real, DY) },
        [MT_GEMM_NT] = { .a = &x, .b = &dy, .d = p->weight->grad },
    };
    for (int i = 0; i < MT_GEMM_LAYOUT_COUNT; i++) {
        struct mt_gemm_args args = passes[i];
        args.dtype = p->dtype, args.layout = (mt_gemm_layout)i, args.d_dtype = p->real;
        MT_TRY(mt_gemm(&p->stream, &args));
    }
    return MT_OK;
}

/* sum_i a[i * a_step] b[i * b_step], and of the magnitudes. */
static double dot(const double *a, int64_t a_step, const double *b, int64_t b_step, int64_t count,
                  double *magnitude)
{
    double sum = 0;
    *magnitude = 0;
    for (int64_t i = 0; i < count; i++) {
        double product = a[i * a_step] * b[i * b_step];
        sum += product;
        *magnitude += fabs(product);
    }
    return sum;
}

/* Holds one element against its limit (K + 1) u sum |a b|, u being half a unit in real's last
 * place. */
static mt_status hold(const struct problem *p, const char *pass, int64_t i, double got, double want,
                      double magnitude, int64_t depth, double *worst)
{
    double unit = p->real == MT_F64 ? 0x1p-53 : 0x1p-24;
    /* the sum it is held against is rounded too, in f64 */
    double limit = (double)(depth + 1) * (unit + 0x1p-53) * magnitude;
    double error = fabs(got - want);
    MT_REQUIRE(error <= limit, MT_EINTERNAL, "gemm %s %s: element %lld is %.17g, must be %.17g",
               mt_dtype_name(p->dtype), pass, (long long)i, got, want);
    if (limit > 0 && error / limit > *worst) *worst = error / limit;
    return MT_OK;
}

static mt_status compare(const struct problem *p, double *worst)
{
    double y[DY + X], dw[W], m;
    size_t real = mt_dtype_size(p->real);
    MT_TRY(mt_device_copy(p->device, y, p->results, (DY + X) * real));
    MT_TRY(mt_device_copy(p->device, dw, p->weight->grad, W * real));
    for (int64_t e = 0; e < MEMBERS; e++) {
        const double *w = p->w + e * OUT * IN;
        int64_t first = first_row[e], rows = first_row[e + 1] - first;
        for (int64_t r = first; r < first + rows; r++) {
            for (int64_t j = 0; j < OUT; j++) {
                double want = dot(p->x + r * IN, 1, w + j * IN, 1, IN, &m);
                double got = mt_load_f64(y, p->real, r * OUT + j);
                MT_TRY(hold(p, "fprop", r * OUT + j, got, want, m, IN, worst));
            }
            for (int64_t c = 0; c < IN; c++) {
                double want = dot(p->dy + r * OUT, 1, w + c, IN, OUT, &m);
                double got = mt_load_f64(y, p->real, DY + r * IN + c);
                MT_TRY(hold(p, "dgrad", r * IN + c, got, want, m, OUT, worst));
            }
        }
        for (int64_t i = 0; i < OUT * IN; i++) {
            double want =
                dot(p->dy + first * OUT + i / IN, OUT, p->x + first * IN + i % IN, IN, rows, &m);
            double got = mt_load_f64(dw, p->real, e * OUT * IN + i);
            MT_TRY(hold(p, "wgrad", e * OUT * IN + i, got, want, m, rows, worst));
        }
    }
    return MT_OK;
}

mt_status mt_selfcheck_gemm(mt_device *device, mt_dtype dtype, double *worst)
{
    *worst = 0;
    mt_status status = MT_OK;
    struct problem *p = calloc(1, sizeof *p);
    MT_REQUIRE(p, MT_ENOMEM, "selfcheck: out of memory");
    p->device = p->stream.device = device, p->dtype = dtype, p->real = mt_dtype_wide(dtype);
    MT_TRY_CLEANUP(make(p));
    MT_TRY_CLEANUP(multiply(p));
    MT_TRY_CLEANUP(compare(p, worst));
cleanup:
    release(p);
    free(p);
    return status;
}
