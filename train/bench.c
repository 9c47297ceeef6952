/* The benchmark's protocol: memory, random data, timing, reports. */
#include "train/bench.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/rng.h"
#include "train/build_info.h"
#include "train/nearest.h"

/* An odd length: buffers of round extents do not repeat themselves. */
enum { NORMALS = (1 << 18) - 1031, WARM_UPS = 4, ROTATED = 2 };

const mt_bench_family mt_bench_families[] = {
    { "gemm", mt_bench_gemm_shape, mt_bench_gemm, true },
    { "moe", mt_bench_layer_name, mt_bench_moe, true },
    { "quantize", mt_bench_quantize_shape, mt_bench_quantize, true },
    { "ops", mt_bench_layer_name, mt_bench_ops, true },
    { "step", mt_bench_step_shape, mt_bench_step, false },
};
const int mt_bench_family_count = sizeof mt_bench_families / sizeof *mt_bench_families;

/* T, D, F, E, top_k; V, S, query heads, key heads, head width. */
const mt_bench_layer mt_bench_layers[] = {
    { "mixtral", 8192, 4096, 14336, 8, 2, 32000, 4096, 32, 8, 128, MT_BENCH_GPU, 0 },
    { "olmoe", 8192, 2048, 1024, 64, 8, 50304, 2048, 16, 16, 128, MT_BENCH_GPU, MT_BENCH_GPU },
    { "qwen3", 8192, 2048, 768, 128, 8, 151936, 4096, 32, 4, 128, MT_BENCH_GPU, 0 },
    { "dsv3", 8192, 7168, 2048, 256, 8, 129280, 4096, 128, 128, 128, MT_BENCH_GPU, 0 },
    { "dsv3_half", 4096, 7168, 2048, 128, 8, 129280, 4096, 128, 128, 128, 0, 0 }, /* of 80 GB */
    { "sonic7b", 24576, 1536, 256, 128, 8, 50304, 2048, 12, 12, 128, MT_BENCH_GPU, 0 },
    { "sonic30b", 32768, 4096, 1024, 64, 4, 151936, 4096, 32, 4, 128, MT_BENCH_GPU, 0 },
    { "small", 8192, 512, 512, 16, 2, 256, 512, 8, 4, 64, MT_BENCH_CPU | MT_BENCH_GPU,
      MT_BENCH_CPU },
    { "tiny", 512, 128, 128, 8, 2, 256, 256, 4, 2, 32, MT_BENCH_CPU, 0 },
    { "nano", 48, 32, 32, 4, 2, 61, 16, 2, 1, 16, 0, 0 },
};
const int mt_bench_layer_count = sizeof mt_bench_layers / sizeof *mt_bench_layers;

const char *mt_bench_layer_name(int i)
{
    return i < mt_bench_layer_count ? mt_bench_layers[i].name : NULL;
}

/* What kinds of devices measure by default. */
static const struct scale {
    const char *device;
    unsigned kind;
    size_t flush; /* bytes that displace what caches hold */
    size_t copy;  /* bytes of one copy */
    int64_t dense;
} scales[] = {
    { "cuda", MT_BENCH_GPU, (size_t)256 << 20, (size_t)2 << 30, 8192 },
    { NULL, MT_BENCH_CPU, (size_t)64 << 20, (size_t)128 << 20, 768 },
};

static const struct scale *scale_of(const mt_device *device)
{
    const struct scale *s = scales;
    while (s->device && strcmp(s->device, device->name) != 0) s++;
    return s;
}

mt_status mt_bench_family_find(const mt_bench_family **family, const char *name)
{
    char known[256] = "";
    for (int i = 0; i < mt_bench_family_count; i++) {
        *family = &mt_bench_families[i];
        if (!strcmp((*family)->name, name)) return MT_OK;
        strcat(strcat(known, " "), (*family)->name);
    }
    const char *near = mt_nearest(name, &mt_bench_families[0].name, mt_bench_family_count,
                                  sizeof mt_bench_families[0]);
    return MT_FAIL(MT_ECONFIG, "bench: family '%s' is not one of%s%s%s", name, known,
                   near ? ": did you mean " : "", near ? near : "");
}

/* ---- shapes and recipes ------------------------------------------------------------------------
 */

/* `text` is a shape's name, or the part of it before a '_'. */
static bool names(const char *text, const char *shape)
{
    size_t n = strlen(text);
    return strncmp(text, shape, n) == 0 && (shape[n] == '\0' || shape[n] == '_');
}

bool mt_bench_selected(const mt_bench *b, const char *shape, unsigned devices)
{
    const char *asked = b->options.shape;
    if (!asked) return devices & scale_of(b->device)->kind;
    return !strcmp(asked, "all") || names(asked, shape);
}

static bool family_has(const mt_bench_family *family, const char *asked)
{
    if (!asked || !strcmp(asked, "all")) return true;
    for (int i = 0; family->shape(i); i++)
        if (names(asked, family->shape(i))) return true;
    return false;
}

static mt_status check_shape(const char *asked, const mt_bench_family *only)
{
    char known[1024] = "";
    size_t at = 0;
    for (int f = 0; f < mt_bench_family_count; f++) {
        const mt_bench_family *family = &mt_bench_families[f];
        if (only && family != only) continue;
        if (family_has(family, asked)) return MT_OK;
        at +=
            (size_t)snprintf(known + at, sizeof known - at, "%s%s:", at ? "; " : "", family->name);
        for (int i = 0; family->shape(i) && at < sizeof known; i++)
            at += (size_t)snprintf(known + at, sizeof known - at, " %s", family->shape(i));
        if (at >= sizeof known) break;
    }
    return MT_FAIL(MT_ECONFIG, "bench: no shape '%s'; there are all, %s", asked, known);
}

mt_status mt_bench_recipe(const char *text, mt_recipe *recipe, bool *none)
{
    *none = !strcmp(text, "none");
    return *none ? MT_OK : mt_recipe_parse(recipe, text);
}

/* ---- memory ------------------------------------------------------------------------------------
 */

mt_status mt_bench_alloc(mt_bench *b, void **p, size_t bytes)
{
    *p = NULL;
    MT_TRY(mt_array_reserve(&b->blocks, &b->block_room, b->block_count + 1, sizeof *b->blocks,
                            "buffers"));
    MT_TRY(mt_device_alloc(b->device, p, bytes, MT_MEMORY_STATE));
    b->blocks[b->block_count++] = (struct mt_bench_block){ *p, bytes };
    return MT_OK;
}

void mt_bench_release(mt_bench *b)
{
    while (b->block_count > 0) {
        struct mt_bench_block *block = &b->blocks[--b->block_count];
        mt_device_free(b->device, &block->p, block->bytes, MT_MEMORY_STATE);
    }
}

mt_status mt_bench_upload(mt_bench *b, void **p, const void *from, size_t bytes)
{
    MT_TRY(mt_bench_alloc(b, p, bytes));
    return mt_device_copy(b->device, *p, from, bytes);
}

mt_status mt_bench_fill(mt_bench *b, void *p, int64_t count, mt_dtype dtype, double scale)
{
    size_t size = mt_dtype_size(dtype);
    int64_t length = count < NORMALS ? count : NORMALS;
    int64_t first = (b->seed++ * 7919) % NORMALS;
    char *host = malloc((size_t)length * size + 1);
    MT_REQUIRE(host, MT_ENOMEM, "bench: no memory for %lld random values", (long long)length);
    for (int64_t i = 0; i < length; i++)
        mt_store_f64(host, dtype, i, scale * (double)b->normals[(first + i) % NORMALS]);
    mt_status status = MT_OK;
    for (int64_t at = 0; at < count && status == MT_OK; at += length) {
        int64_t part = count - at < length ? count - at : length;
        status = mt_device_copy(b->device, (char *)p + (size_t)at * size, at ? (char *)p : host,
                                (size_t)part * size);
    }
    free(host);
    return status;
}

mt_status mt_bench_random(mt_bench *b, void **p, int64_t count, mt_dtype dtype, double scale)
{
    MT_TRY(mt_bench_alloc(b, p, (size_t)count * mt_dtype_size(dtype)));
    return mt_bench_fill(b, *p, count, dtype, scale);
}

mt_status mt_bench_rows(mt_bench *b, mt_group *group, int64_t members, int64_t rows, int64_t width)
{
    enum { SEED = 5 };
    void *counts_there = NULL, *offsets_there = NULL;
    mt_status status = MT_OK;
    int64_t *counts = calloc((size_t)(2 * members + 1), sizeof *counts),
            *offsets = counts + members;
    MT_REQUIRE(counts, MT_ENOMEM, "bench: no memory for %lld members", (long long)members);
    for (int64_t r = 0; r < rows; r++)
        counts[mt_rng_below(SEED, 0, (uint64_t)r, (uint64_t)members)]++;
    for (int64_t e = 0; e < members; e++) offsets[e + 1] = offsets[e] + counts[e] * width;
    MT_TRY_CLEANUP(mt_bench_upload(b, &counts_there, counts, (size_t)members * sizeof *counts));
    MT_TRY_CLEANUP(
        mt_bench_upload(b, &offsets_there, offsets, (size_t)(members + 1) * sizeof *offsets));
    *group = mt_group_ragged_rows(members, rows, width, counts_there, offsets_there);
cleanup:
    free(counts);
    return status;
}

/* ---- timing ------------------------------------------------------------------------------------
 */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static mt_status record(mt_bench *b, mt_graph *graph, mt_bench_launch launch, void *context,
                        int64_t turn)
{
    MT_TRY(mt_graph_begin(b->device));
    mt_status status = launch(b, context, turn);
    mt_status ended = mt_graph_end(graph, b->device, status == MT_OK);
    return status == MT_OK ? ended : status;
}

void mt_bench_use(mt_bench *b, int i)
{
    b->device = b->stream.device = b->sets[i];
}

mt_status mt_bench_measure(mt_bench *b, double *median, mt_bench_launch launch, void *context)
{
    int64_t launches = b->options.launches;
    int64_t warm = launches < WARM_UPS && !b->graph ? launches : WARM_UPS;
    bool graph = b->graph && mt_device_records(b->device);
    mt_graph graphs[ROTATED] = { { 0 } };
    mt_status status = MT_OK;
    for (int64_t i = 0; i < warm; i++) MT_TRY(launch(b, context, i));
    for (int64_t i = 0; i < ROTATED && graph; i++)
        MT_TRY_CLEANUP(record(b, &graphs[i], launch, context, i));
    for (int64_t i = 0; i < launches; i++) {
        for (int64_t f = 0; f < b->options.flushes; f++)
            MT_TRY_CLEANUP(mt_device_zero(b->device, b->flush, scale_of(b->device)->flush));
        MT_TRY_CLEANUP(mt_timer_start(&b->timers[i], &b->stream));
        MT_TRY_CLEANUP(graph ? mt_graph_launch(&graphs[i % ROTATED])
                             : launch(b, context, warm + i));
        MT_TRY_CLEANUP(mt_timer_stop(&b->timers[i], &b->stream));
    }
    for (int64_t i = 0; i < launches; i++)
        MT_TRY_CLEANUP(mt_timer_read(&b->timers[i], &b->seconds[i]));
    qsort(b->seconds, (size_t)launches, sizeof *b->seconds, by_value);
    *median = b->seconds[launches / 2];
    if (*median <= 0) *median = 1e-9; /* of an empty launch: the clock's own grain */
cleanup:
    for (int i = 0; i < ROTATED; i++) mt_graph_destroy(&graphs[i]);
    return status;
}

double mt_bench_floor(const mt_bench *b, double flop, double bytes)
{
    double arithmetic = flop / b->peak, memory = bytes / b->bandwidth;
    return arithmetic > memory ? arithmetic : memory;
}

/* ---- reports -----------------------------------------------------------------------------------
 */

static mt_status write_line(mt_bench *b, json_t *line)
{
    mt_status status = MT_OK;
    FILE *to = b->json;
    if (!line)
        status = MT_FAIL(MT_ENOMEM, "bench: no memory for a line of JSON");
    else if (to && (json_dumpf(line, to, JSON_REAL_PRECISION(6)) != 0 || fputc('\n', to) == EOF ||
                    fflush(to) != 0))
        status =
            MT_FAIL(MT_EIO, "bench: %s cannot be written: %s", b->options.json, strerror(errno));
    json_decref(line);
    return status;
}

static const char *recipe_name(const mt_bench_case *c)
{
    return c->recipe ? c->recipe : "none";
}

static json_t *case_line(const mt_bench *b, const mt_bench_case *c)
{
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s*}", "family", c->family, "shape", c->shape,
                     "case", c->what, "dtype", mt_dtype_name(b->options.dtype), "recipe",
                     recipe_name(c), "kernel_set", b->device->kernel_set, "path", b->path);
}

mt_status mt_bench_report(mt_bench *b, const mt_bench_case *c, double seconds)
{
    double rate = c->amount / seconds, best = c->floor > 0 ? c->amount / c->floor : 0;
    double share = c->floor / seconds;
    printf("%-9s %-17s %-20s %-14s %10.4f ms %10.5g", c->family, c->shape, c->what, recipe_name(c),
           seconds * 1e3, rate);
    printf(" %-8s floor %10.4f ms %10.5g  %5.1f %%", c->unit, c->floor * 1e3, best, 100 * share);
    json_t *line = case_line(b, c);
    if (line) {
        json_object_set_new(line, "ms", json_real(seconds * 1e3));
        json_object_set_new(line, "rate", json_real(rate));
        json_object_set_new(line, "unit", json_string(c->unit));
        json_object_set_new(line, "floor_ms", json_real(c->floor * 1e3));
        json_object_set_new(line, "share", json_real(share));
    }
    for (int i = 0; i < MT_BENCH_NOTES && c->notes[i].name; i++) {
        printf("  %s %.4g", c->notes[i].name, c->notes[i].value);
        if (line) json_object_set_new(line, c->notes[i].name, json_real(c->notes[i].value));
    }
    if (b->set_count > 1) printf("  %s", b->device->kernel_set);
    if (b->path) printf("  by %s", b->path);
    if (b->graph && !mt_device_records(b->device)) printf("  (not recorded)");
    printf("\n");
    fflush(stdout);
    b->measured++;
    return write_line(b, line);
}

mt_status mt_bench_leave_out(mt_bench *b, const mt_bench_case *c, const char *why)
{
    printf("%-9s %-17s %-20s %-14s not measured: %s\n", c->family, c->shape, c->what,
           recipe_name(c), why);
    json_t *line = case_line(b, c);
    if (line) json_object_set_new(line, "error", json_string(why));
    return write_line(b, line);
}

mt_status mt_bench_give_up(mt_bench *b, const mt_bench_case *c, mt_status status)
{
    mt_bench_release(b);
    if (status != MT_ENOMEM && status != MT_EUNSUPPORTED) return status;
    b->failed = status;
    snprintf(b->failure, sizeof b->failure, "%s", mt_error_message());
    mt_error_clear();
    char why[sizeof b->failure + 64];
    snprintf(why, sizeof why, "%s; nor what would follow of this shape and recipe", b->failure);
    return mt_bench_leave_out(b, c, why);
}

static mt_status print_machine(mt_bench *b, int64_t n)
{
    mt_device *d = b->device;
    const char *path = d->kernels[b->options.dtype]->gemm_path;
    mt_dtype grads = b->options.bf16_grads ? MT_BF16 : mt_dtype_wide(b->options.dtype);
    printf("%s, kernel set %s, %d thread%s, revision %s; GEMM: %s\n", d->name, d->kernel_set,
           d->threads, d->threads == 1 ? "" : "s", mt_build_revision(), path);
    printf("copy bandwidth %.1f GB/s read and written; dense %lld^3 %s product %.4g TFLOP/s\n",
           b->bandwidth * 1e-9, (long long)n, mt_dtype_name(b->options.dtype), b->peak * 1e-12);
    printf("medians of %lld launches; floor: arithmetic at the dense product's rate or unique "
           "bytes at the copy's; moe, step: gradients of weights in %s\n",
           (long long)b->options.launches, mt_dtype_name(grads));
    printf("%-9s %-17s %-20s %-14s %13s %10s %-8s %19s %10s  %7s\n", "family", "shape", "case",
           "recipe", "median", "rate", "", "floor", "rate", "share");
    fflush(stdout);
    return write_line(
        b, json_pack("{s:s, s:s, s:s, s:i, s:s, s:s, s:s, s:s, s:f, s:f, s:I, s:I, s:I, s:b}",
                     "family", "machine", "device", d->name, "kernel_set", d->kernel_set, "threads",
                     d->threads, "revision", mt_build_revision(), "gemm_path", path, "dtype",
                     mt_dtype_name(b->options.dtype), "grad_dtype", mt_dtype_name(grads),
                     "copy_gbs", b->bandwidth * 1e-9, "dense_tflops", b->peak * 1e-12, "dense_n",
                     (json_int_t)n, "launches", (json_int_t)b->options.launches, "flushes",
                     (json_int_t)b->options.flushes, "graph", (int)b->options.graph));
}

/* ---- the run -----------------------------------------------------------------------------------
 */

static mt_status check_options(const mt_bench_options *o, const mt_bench_family *family)
{
    MT_REQUIRE(o->launches >= 1 && o->launches <= MT_BENCH_LAUNCHES_MAX, MT_ECONFIG,
               "bench: launches is %lld, must be in 1..%d", (long long)o->launches,
               MT_BENCH_LAUNCHES_MAX);
    MT_REQUIRE(o->flushes >= 1 && o->flushes <= MT_BENCH_FLUSHES_MAX, MT_ECONFIG,
               "bench: flushes is %lld, must be in 1..%d", (long long)o->flushes,
               MT_BENCH_FLUSHES_MAX);
    if (o->shape) MT_TRY(check_shape(o->shape, family));
    mt_recipe recipe;
    bool none;
    for (int i = 0; i < o->recipe_count; i++)
        MT_TRY(mt_bench_recipe(o->recipes[i], &recipe, &none));
    return MT_OK;
}

static mt_status open_sets(mt_bench *b)
{
    const mt_bench_options *o = &b->options;
    const struct mt_kernels *kernels[MT_BENCH_SETS];
    MT_REQUIRE(o->kernel_count <= MT_BENCH_SETS, MT_ECONFIG, "bench: more than %d kernel sets",
               MT_BENCH_SETS);
    for (int i = 0; i == 0 || i < o->kernel_count; i++) {
        MT_TRY(mt_device_open(&b->sets[i], o->device, o->kernel_count ? o->kernels[i] : NULL,
                              o->threads));
        b->set_count++;
        MT_TRY(mt_device_kernels(b->sets[i], o->dtype, &kernels[i]));
        MT_REQUIRE(kernels[i]->pack_weight == kernels[0]->pack_weight, MT_ECONFIG,
                   "bench: kernel sets %s and %s pack weights differently, must be timed one by "
                   "one",
                   b->sets[0]->kernel_set, b->sets[i]->kernel_set);
    }
    mt_bench_use(b, 0);
    return MT_OK;
}

static mt_status open_bench(mt_bench *b)
{
    enum { SEED = 1 };
    MT_TRY(open_sets(b));
    MT_REQUIRE(b->device->computes, MT_ECONFIG, "bench: device %s computes nothing",
               b->device->name);
    MT_REQUIRE(!b->options.graph || mt_device_records(b->device), MT_EUNSUPPORTED,
               "bench: device %s records no graphs with kernel set %s", b->device->name,
               b->device->kernel_set);
    size_t launches = (size_t)b->options.launches;
    b->timers = calloc(launches, sizeof *b->timers), b->seconds = calloc(launches, sizeof(double));
    b->normals = malloc(NORMALS * sizeof *b->normals);
    MT_REQUIRE(b->timers && b->seconds && b->normals, MT_ENOMEM, "bench: out of memory");
    for (int64_t i = 0; i < NORMALS; i++)
        b->normals[i] = (float)mt_rng_normal(SEED, 0, (uint64_t)i);
    for (size_t i = 0; i < launches; i++) MT_TRY(mt_timer_create(&b->timers[i], b->device));
    return mt_device_alloc(b->device, &b->flush, scale_of(b->device)->flush, MT_MEMORY_WORKSPACE);
}

static void close_bench(mt_bench *b)
{
    if (b->device) {
        mt_bench_release(b);
        mt_device_free(b->device, &b->flush, scale_of(b->device)->flush, MT_MEMORY_WORKSPACE);
    }
    for (int64_t i = 0; b->timers && i < b->options.launches; i++) mt_timer_destroy(&b->timers[i]);
    free(b->timers), free(b->seconds), free(b->normals), free(b->blocks);
    for (int i = 0; i < b->set_count; i++) mt_device_destroy(&b->sets[i]);
}

mt_status mt_bench_run(const mt_bench_options *options, const mt_bench_family *family)
{
    mt_bench b = { .options = *options };
    mt_status status = MT_OK;
    MT_TRY_CLEANUP(check_options(options, family));
    MT_TRY_CLEANUP(open_bench(&b));
    if (options->json && !(b.json = fopen(options->json, "w")))
        MT_TRY_CLEANUP(MT_FAIL(MT_EIO, "bench: %s: %s", options->json, strerror(errno)));
    int64_t n = scale_of(b.device)->dense;
    MT_TRY_CLEANUP(mt_bench_measure_copy(&b, scale_of(b.device)->copy));
    MT_TRY_CLEANUP(mt_bench_measure_dense(&b, n));
    MT_TRY_CLEANUP(print_machine(&b, n));
    for (int i = 0; i < mt_bench_family_count; i++) {
        const mt_bench_family *f = &mt_bench_families[i];
        if (family && f != family) continue;
        if (!family_has(f, options->shape)) {
            printf("%-9s has no shape '%s'\n", f->name, options->shape);
            continue;
        }
        b.graph = options->graph && f->records;
        MT_TRY_CLEANUP(f->run(&b));
    }
    if (b.measured == 0)
        status = b.failed ? MT_FAIL(b.failed, "bench: no case ran; the last: %s", b.failure)
                          : MT_FAIL(MT_EINTERNAL, "bench: nothing was measured");
cleanup:
    if (b.json && fclose(b.json) != 0 && status == MT_OK)
        status = MT_FAIL(MT_EIO, "bench: %s: %s", options->json, strerror(errno));
    close_bench(&b);
    return status;
}
