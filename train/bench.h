/* mixtape bench: how fast this build computes on a device, one family of work at a time.
 *
 * Protocol, the same for every family: random data, caches flushed before each launch, inputs
 * taken in turns, launches queued without waiting in between, medians of the device's own times.
 * Two measurements come first: copy bandwidth (bytes read and written) and our dense product. The
 * floor of a case is what they allow: for each kernel that the work cannot do without, the longer
 * of its arithmetic and of its unique bytes. Products of narrower formats than the dense one's may
 * go below their floor. */
#pragma once

#include <stdio.h>

#include "core/recipe.h"
#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_bench_options {
    const char *device; /* "auto", "cpu", "cuda" */
    int threads;        /* as in mt_device_open */
    const char *shape;  /* a name, or what comes before its '_'; "all"; NULL: the device's own */
    mt_dtype dtype;     /* of activations */
    bool bf16_grads;    /* moe and step: gradients of weights are stored in bf16 */
    const char *const *recipes; /* of linear layers; "none": the dtype */
    int recipe_count;
    const char *const *kernels; /* sets of the device, at most MT_BENCH_SETS; none: its own choice.
                                   gemm times every one, the others the first. They must agree on
                                   how weights are packed. */
    int kernel_count;
    int64_t launches; /* timed ones of each case, 1..MT_BENCH_LAUNCHES_MAX */
    int64_t flushes;  /* of caches before each, 1..MT_BENCH_FLUSHES_MAX; with many of them all of a
                         launch is queued before it begins, however slow the host is */
    bool graph;       /* launches are replays of recorded graphs; steps are as they are */
    const char *json; /* a file for an object a line, begun anew when all else is known; or NULL */
} mt_bench_options;

enum {
    MT_BENCH_LAUNCHES = 15,
    MT_BENCH_LAUNCHES_MAX = 1000,
    MT_BENCH_FLUSHES_MAX = 1000,
    MT_BENCH_NOTES = 4,
    MT_BENCH_SETS = 8
};

/* Which devices measure a shape when none is named. */
enum { MT_BENCH_CPU = 1, MT_BENCH_GPU = 2 };

typedef struct mt_bench {
    mt_bench_options options;
    mt_device *device; /* in use; of sets */
    mt_device *sets[MT_BENCH_SETS];
    int set_count;
    mt_stream stream;
    mt_timer *timers; /* [launches] */
    double *seconds;  /* [launches] */
    float *normals;   /* random values that every buffer is filled with */
    struct mt_bench_block {
        void *p;
        size_t bytes;
    } * blocks; /* of device memory, freed by mt_bench_release */
    int64_t block_count, block_room;
    void *flush;
    FILE *json;       /* or NULL */
    bool graph;       /* this family's launches are recorded, where the kernel set can be */
    const char *path; /* how the case in hand is computed, or NULL */
    int64_t seed;     /* of the next buffer */
    double bandwidth; /* bytes a second, read and written */
    double peak;      /* FLOP a second of the dense product */
    int64_t measured; /* cases so far */
    mt_status failed; /* of the last case that did not run */
    char failure[512];
} mt_bench;

typedef struct mt_bench_family {
    const char *name;
    const char *(*shape)(int i); /* name of the i-th shape, NULL past the last */
    mt_status (*run)(mt_bench *b);
    bool records; /* launches read nothing back, so they can be recorded */
} mt_bench_family;

/* gemm, moe, quantize, ops, step. */
extern const mt_bench_family mt_bench_families[];
extern const int mt_bench_family_count;

/* MT_ECONFIG names the text and the known names. */
mt_status mt_bench_family_find(const mt_bench_family **family, const char *name);

/* Measures `count` families, or all when family is NULL, and prints them. Errors: MT_ECONFIG for
 * an option, with the known shapes; a case that does not fit into memory, or that the device does
 * not compute, is reported in its place; it is an error when no case ran. */
mt_status mt_bench_run(const mt_bench_options *options, const mt_bench_family *family);

/* ---- for the families ---- */

/* A case to report. `amount` over the median time is the rate in `unit`. */
typedef struct mt_bench_case {
    const char *family, *shape, *what;
    const char *recipe; /* or NULL */
    const char *unit;   /* "TFLOP/s", "GB/s", "tok/s" */
    double amount;
    double floor; /* seconds */
    struct {
        const char *name; /* NULL ends them */
        double value;
    } notes[MT_BENCH_NOTES];
} mt_bench_case;

/* One launch; `turn` counts them. */
typedef mt_status (*mt_bench_launch)(mt_bench *b, void *context, int64_t turn);

/* Whether a shape with these default devices is asked for. */
bool mt_bench_selected(const mt_bench *b, const char *shape, unsigned devices);

/* b->bandwidth of a copy of so many bytes: the faster of the device's own and of a kernel that only
 * moves elements, since the CPU's runs on one thread. b->peak of an n x n x n product, its weight
 * packed as a layer's is. */
mt_status mt_bench_measure_copy(mt_bench *b, size_t bytes);
mt_status mt_bench_measure_dense(mt_bench *b, int64_t n);
/* Seconds that so many FLOP, and so many bytes, take at least. */
double mt_bench_floor(const mt_bench *b, double flop, double bytes);

/* What is measured next runs with the i-th kernel set; memory belongs to the first. */
void mt_bench_use(mt_bench *b, int i);

mt_status mt_bench_measure(mt_bench *b, double *median, mt_bench_launch launch, void *context);
mt_status mt_bench_report(mt_bench *b, const mt_bench_case *c, double seconds);
/* Reports a case that failed with MT_ENOMEM or MT_EUNSUPPORTED in its place and goes on; other
 * statuses are returned. Frees what the case has allocated here. */
mt_status mt_bench_give_up(mt_bench *b, const mt_bench_case *c, mt_status status);

/* Reports a case whose time says nothing, in its place. */
mt_status mt_bench_leave_out(mt_bench *b, const mt_bench_case *c, const char *why);

/* Device memory until mt_bench_release: undefined; copied from the host; random of deviation
 * `scale`. */
mt_status mt_bench_alloc(mt_bench *b, void **p, size_t bytes);
mt_status mt_bench_upload(mt_bench *b, void **p, const void *from, size_t bytes);
mt_status mt_bench_random(mt_bench *b, void **p, int64_t count, mt_dtype dtype, double scale);
/* Fills memory that is somebody's. */
mt_status mt_bench_fill(mt_bench *b, void *p, int64_t count, mt_dtype dtype, double scale);
void mt_bench_release(mt_bench *b);

/* `rows` rows of `width` columns, each drawn to one of the members: the same rows for any width. */
mt_status mt_bench_rows(mt_bench *b, mt_group *group, int64_t members, int64_t rows, int64_t width);

/* The recipe's text as a recipe; *recipe stays untouched for "none", *none tells. */
mt_status mt_bench_recipe(const char *text, mt_recipe *recipe, bool *none);

/* MoE layers of known models. */
typedef struct mt_bench_layer {
    const char *name;
    int64_t tokens, width, expert_width, experts, top_k;
    int64_t vocab, sequence, heads, kv_heads, head_dim; /* of the model around it */
    unsigned devices, op_devices;                       /* defaults of families moe and ops */
} mt_bench_layer;

extern const mt_bench_layer mt_bench_layers[];
extern const int mt_bench_layer_count;
const char *mt_bench_layer_name(int i);

mt_status mt_bench_gemm(mt_bench *b);
mt_status mt_bench_moe(mt_bench *b);
mt_status mt_bench_quantize(mt_bench *b);
mt_status mt_bench_ops(mt_bench *b);
mt_status mt_bench_step(mt_bench *b);
const char *mt_bench_gemm_shape(int i);
const char *mt_bench_quantize_shape(int i);
const char *mt_bench_step_shape(int i);

#ifdef __cplusplus
}
#endif
