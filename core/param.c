/* The param store: every param's master, gradient and compute copy in flat buffers. */
#include "core/param.h"

#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/param_priv.h"
#include "core/rng.h"

enum { ALIGN_ELEMENTS = MT_SHARD_ALIGN, ALIGN_BYTES = 256 };

/* Up to here sums of bytes over masters, gradients, moments and copies fit an int64_t. */
static const int64_t MOST_ELEMENTS = INT64_C(1) << 56;

static int64_t round_up(int64_t x, int64_t to)
{
    return mt_round_up(x, to);
}

mt_status mt_param_store_create(mt_param_store **store, mt_device *device, mt_dtype dtype,
                                mt_dtype compute)
{
    *store = NULL;
    MT_REQUIRE(device, MT_EINVAL, "param store: no device");
    MT_REQUIRE(mt_format_plain(compute), MT_EINVAL, "param store: nothing is computed in %s",
               mt_dtype_name(compute));
    MT_REQUIRE(dtype == mt_dtype_wide(compute), MT_EINVAL,
               "param store: masters are %s, must be %s where activations are %s",
               mt_dtype_name(dtype), mt_dtype_name(mt_dtype_wide(compute)), mt_dtype_name(compute));
    mt_param_store *s = calloc(1, sizeof *s);
    MT_REQUIRE(s, MT_ENOMEM, "param store: out of memory");
    s->device = device, s->dtype = dtype, s->compute = compute;
    s->world = s->member_ranks = s->units = 1;
    *store = s;
    return MT_OK;
}

static void param_destroy(mt_param *p)
{
    if (!p) return;
    for (int64_t i = 0; i < p->part_count; i++) free(p->parts[i].name);
    free(p->parts);
    free(p->name);
    free(p);
}

void mt_param_store_destroy(mt_param_store **store)
{
    mt_param_store *s = *store;
    if (!s) return;
    for (int64_t i = 0; i < s->count; i++) param_destroy(s->params[i]);
    mt_param_store_free_state(s, &s->master, s->flat_bytes, MT_MEMORY_MASTER);
    mt_device_free(s->device, &s->mirror, s->mirror_bytes, MT_MEMORY_MASTER);
    mt_device_free(s->device, &s->view, s->view_bytes, MT_MEMORY_MASTER);
    mt_device_free(s->device, &s->grad, s->grad_bytes, MT_MEMORY_GRAD);
    mt_device_free(s->device, &s->whole, s->whole_bytes, MT_MEMORY_GRAD);
    mt_device_free(s->device, &s->codes, s->compute_bytes, MT_MEMORY_COMPUTE);
    free(s->unit);
    free(s->cuts);
    free(s->params);
    free(s);
    *store = NULL;
}

static mt_status check_spec(const mt_param_spec *spec)
{
    MT_REQUIRE(spec->name && *spec->name, MT_EINVAL, "param store: a param without a name");
    MT_REQUIRE(spec->members >= 0 && spec->m >= 0 && spec->k >= 0, MT_EINVAL,
               "param '%s' is %lld x [%lld, %lld], must not be negative", spec->name,
               (long long)spec->members, (long long)spec->m, (long long)spec->k);
    int64_t all = spec->all_members ? spec->all_members : spec->members;
    MT_REQUIRE(spec->first_member >= 0 && spec->members <= all &&
                   spec->first_member <= all - spec->members,
               MT_EINVAL, "param '%s': %lld members from %lld on are not among %lld", spec->name,
               (long long)spec->members, (long long)spec->first_member, (long long)all);
    return MT_OK;
}

mt_status mt_param_store_add(mt_param_store *store, mt_param **param, const mt_param_spec *spec)
{
    *param = NULL;
    MT_TRY(check_spec(spec));
    MT_REQUIRE(!store->allocated, MT_EINVAL, "param '%s' added after allocation", spec->name);
    MT_REQUIRE(!mt_param_store_find(store, spec->name), MT_EINVAL, "param '%s' added twice",
               spec->name);
    int64_t more = spec->members;
    bool over = __builtin_mul_overflow(more, spec->m, &more) ||
                __builtin_mul_overflow(more, spec->k, &more) ||
                __builtin_add_overflow(more, store->added, &more) || more > MOST_ELEMENTS;
    MT_REQUIRE(!over, MT_ECONFIG,
               "param '%s' of %lld x [%lld, %lld]: more than 2^56 elements in all params",
               spec->name, (long long)spec->members, (long long)spec->m, (long long)spec->k);
    MT_TRY(mt_array_reserve(&store->params, &store->reserved, store->count + 1,
                            sizeof *store->params, "params"));
    mt_param *p = calloc(1, sizeof *p);
    if (p) p->name = strdup(spec->name);
    if (!p || !p->name) {
        param_destroy(p);
        return MT_FAIL(MT_ENOMEM, "param '%s': out of memory", spec->name);
    }
    p->group = mt_group_uniform(spec->members, spec->m, spec->k);
    p->first_member = spec->first_member;
    p->all_members = spec->all_members ? spec->all_members : spec->members;
    p->dtype = p->grad_dtype = store->dtype, p->compute = store->compute;
    p->decay = spec->decay, p->frozen = spec->frozen, p->packed = spec->packed;
    p->direct = spec->direct;
    p->init = spec->init, p->init_std = spec->init_std;
    p->unit = store->units - 1, p->atom = 1;
    p->weight.group = p->group;
    store->params[store->count++] = p;
    store->added = more;
    *param = p;
    return MT_OK;
}

mt_status mt_param_add_part(mt_param *param, int64_t member, int64_t row, int64_t rows, int ndim,
                            const char *format, ...)
{
    MT_REQUIRE(member >= 0 && member < param->all_members && row >= 0 && rows >= 0 &&
                   row <= param->group.m - rows,
               MT_EINVAL, "param '%s': %lld rows from %lld on of member %lld, it has %lld of %lld",
               param->name, (long long)rows, (long long)row, (long long)member,
               (long long)param->group.m, (long long)param->all_members);
    MT_REQUIRE(ndim == 1 || ndim == 2, MT_EINVAL, "param '%s': a part of %d dims, must be 1 or 2",
               param->name, ndim);
    mt_param_part *grown =
        realloc(param->parts, (size_t)(param->part_count + 1) * sizeof *param->parts);
    MT_REQUIRE(grown, MT_ENOMEM, "param '%s': out of memory", param->name);
    param->parts = grown;
    char name[256];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    mt_param_part part = { strdup(name), member, row, rows, ndim };
    MT_REQUIRE(part.name, MT_ENOMEM, "param '%s': out of memory", param->name);
    param->parts[param->part_count++] = part;
    return MT_OK;
}

void mt_param_reserve_compute(mt_param *param, size_t bytes)
{
    if (bytes > param->compute_bytes) param->compute_bytes = bytes;
}

/* Weights that kernels read only as compute copies. */
static bool is_copied(const mt_param *p)
{
    return p->packed && !p->direct;
}

mt_status mt_param_store_set_grad_dtype(mt_param_store *store, mt_dtype dtype)
{
    if (dtype == store->dtype) return MT_OK;
    MT_REQUIRE(dtype == MT_BF16 && store->dtype == MT_F32 && store->compute == MT_BF16, MT_ECONFIG,
               "gradients of weights cannot be %s: bf16 ones need masters of f32 and activations "
               "of bf16, these are %s and %s",
               mt_dtype_name(dtype), mt_dtype_name(store->dtype), mt_dtype_name(store->compute));
    MT_REQUIRE(!store->allocated, MT_EINVAL, "param store: gradients of %s after allocation",
               mt_dtype_name(dtype));
    store->bf16_grads = true;
    return MT_OK;
}

/* Chooses the form of every gradient, and counts those that the flat buffer has in bf16: what ranks
 * have added up is real. */
static void choose_grads(mt_param_store *s)
{
    for (int64_t i = 0; s->bf16_grads && i < s->count; i++) {
        mt_param *p = s->params[i];
        if (!is_copied(p)) continue;
        p->grad_dtype = MT_BF16;
        if (s->world == 1) s->bf16_elements += round_up(mt_param_count(p), ALIGN_ELEMENTS);
    }
}

/* Bytes of a gradient as backward writes it, with the gap after it. */
static size_t grad_bytes(const mt_param *p)
{
    return (size_t)round_up(mt_param_count(p), ALIGN_ELEMENTS) * mt_dtype_size(p->grad_dtype);
}

/* Where the gradient of the own piece is; *bf16: elements of those in bf16 before it. */
static void *place_grad(const mt_param_store *s, const mt_param *p, int64_t *bf16)
{
    size_t size = mt_dtype_size(s->dtype);
    if (p->grad_dtype == s->dtype || s->world > 1)
        return (char *)s->grad + (size_t)(p->offset - *bf16) * size;
    char *first = (char *)s->grad + (size_t)(s->elements - s->bf16_elements) * size;
    void *at = first + (size_t)*bf16 * mt_dtype_size(MT_BF16);
    *bf16 += round_up(p->own.count, ALIGN_ELEMENTS);
    return at;
}

/* Bytes of a param's copy on the device beside an offloaded master; 0: it has none. */
static size_t mirrored(const mt_param_store *s, int64_t i)
{
    const mt_param *p = s->params[i];
    if (!s->offloaded || s->world > 1 || is_copied(p)) return 0;
    return (size_t)round_up(mt_param_count(p) * (int64_t)mt_dtype_size(p->dtype), ALIGN_BYTES);
}

/* Points every param into the flat buffers. */
static void place(mt_param_store *s)
{
    size_t size = mt_dtype_size(s->dtype), at = 0, whole = 0, mirror = 0;
    int64_t bf16 = 0;
    for (int64_t i = 0; i < s->count; i++) {
        mt_param *p = s->params[i];
        p->own = mt_param_piece(s, p, s->unit[p->unit].rank), p->offset = p->own.offset;
        p->own_master = (char *)s->master + (size_t)p->offset * size;
        p->own_grad = s->grad ? place_grad(s, p, &bf16) : NULL;
        p->master = s->world == 1 ? p->own_master : NULL;
        if (mirrored(s, i)) p->master = (char *)s->mirror + mirror;
        mirror += mirrored(s, i);
        p->grad = s->whole ? (char *)s->whole + whole : p->own_grad;
        whole += grad_bytes(p);
        if (!p->compute_bytes || !s->codes) continue;
        p->compute_memory = (char *)s->codes + at;
        at += (size_t)round_up((int64_t)p->compute_bytes, ALIGN_BYTES);
    }
}

/* ---- split masters -----------------------------------------------------------------------------
 */

static const char *const master_names[] = {
    [MT_MASTER_REAL] = "f32", [MT_MASTER_SPLIT] = "bf16+i16"
};
_Static_assert(sizeof master_names / sizeof *master_names == MT_MASTER_COUNT, "a name for each");

const char *mt_master_name(mt_master master)
{
    return master_names[master];
}

mt_status mt_param_store_set_master(mt_param_store *store, mt_master master)
{
    MT_REQUIRE(!store->allocated, MT_EINVAL, "param store: masters in %s after allocation",
               mt_master_name(master));
    MT_REQUIRE(store->dtype == MT_F32 || master == MT_MASTER_REAL, MT_ECONFIG,
               "masters are %s, only f32 ones are kept as %s", mt_dtype_name(store->dtype),
               mt_master_name(master));
    store->form = master;
    for (int64_t i = 0; i < store->count; i++) {
        mt_param *p = store->params[i];
        p->lends =
            master == MT_MASTER_SPLIT && is_copied(p) && !store->offloaded && store->world == 1;
    }
    return MT_OK;
}

mt_master mt_param_store_master_form(const mt_param_store *store)
{
    return store->form;
}

/* Gives masters that are still zero their form: all bits are 0 in each. */
static mt_status split_masters(mt_param_store *store)
{
    if (store->form == MT_MASTER_REAL) return MT_OK;
    for (int64_t i = 0; i < store->count; i++) {
        const mt_param *p = store->params[i];
        size_t need = (size_t)p->own.count * sizeof(float);
        if (is_copied(p) && need > store->view_bytes) store->view_bytes = need;
    }
    MT_TRY(mt_device_alloc(store->device, &store->view, store->view_bytes, MT_MEMORY_MASTER));
    for (int64_t i = 0; i < store->count; i++) {
        mt_param *p = store->params[i];
        if (!is_copied(p)) continue;
        p->high = p->own_master;
        p->low = (int16_t *)p->own_master + round_up(p->own.count, ALIGN_ELEMENTS);
        p->view = store->view;
        p->master = p->own_master = NULL;
    }
    return MT_OK;
}

/* ---- allocation --------------------------------------------------------------------------------
 */

mt_status mt_param_store_allocate(mt_param_store *store, bool grads)
{
    MT_REQUIRE(!store->allocated, MT_EINVAL, "param store allocated twice");
    store->allocated = true;
    MT_TRY(mt_param_store_cut(store));
    choose_grads(store);
    size_t whole = 0;
    for (int64_t i = 0; i < store->count; i++) {
        whole += grad_bytes(store->params[i]);
        if (store->world == 1)
            store->compute_bytes +=
                (size_t)round_up((int64_t)store->params[i]->compute_bytes, ALIGN_BYTES);
    }
    size_t size = mt_dtype_size(store->dtype);
    store->flat_bytes = (size_t)store->elements * size;
    store->grad_bytes =
        grads ? store->flat_bytes - (size_t)store->bf16_elements * (size - mt_dtype_size(MT_BF16))
              : 0;
    store->whole_bytes = grads && store->world > 1 ? whole : 0;
    MT_TRY(mt_device_alloc(store->device, &store->whole, store->whole_bytes, MT_MEMORY_GRAD));
    MT_TRY(mt_device_zero(store->device, store->whole, store->whole_bytes));
    MT_TRY(mt_param_store_alloc_state(store, &store->master, store->flat_bytes, MT_MEMORY_MASTER));
    for (int64_t i = 0; i < store->count; i++) store->mirror_bytes += mirrored(store, i);
    MT_TRY(mt_device_alloc(store->device, &store->mirror, store->mirror_bytes, MT_MEMORY_MASTER));
    MT_TRY(mt_device_alloc(store->device, &store->grad, store->grad_bytes, MT_MEMORY_GRAD));
    MT_TRY(mt_device_alloc(store->device, &store->codes, store->compute_bytes, MT_MEMORY_COMPUTE));
    MT_TRY(mt_device_zero(store->device, store->grad, store->grad_bytes));
    place(store);
    return split_masters(store);
}

/* ---- offloaded masters -------------------------------------------------------------------------
 */

void mt_param_store_offload(mt_param_store *store)
{
    store->offloaded = true;
}

static mt_memory state_memory(const mt_param_store *s, mt_memory memory)
{
    return s->offloaded ? MT_MEMORY_HOST_POOL : memory;
}

mt_status mt_param_store_alloc_state(mt_param_store *s, void **p, size_t bytes, mt_memory memory)
{
    MT_TRY(mt_device_alloc(s->device, p, bytes, state_memory(s, memory)));
    if (!s->offloaded) return mt_device_zero(s->device, *p, bytes);
    if (*p && s->device->computes) memset(*p, 0, bytes);
    return MT_OK;
}

void mt_param_store_free_state(mt_param_store *s, void **p, size_t bytes, mt_memory memory)
{
    mt_device_free(s->device, p, bytes, state_memory(s, memory));
}

mt_status mt_param_store_refresh(mt_param_store *s, mt_stream *stream)
{
    for (int64_t i = 0; i < s->count; i++) {
        const mt_param *p = s->params[i];
        if (mirrored(s, i))
            MT_TRY(mt_device_copy_async(stream, p->master, p->own_master,
                                        (size_t)mt_param_count(p) * mt_dtype_size(p->dtype)));
    }
    return MT_OK;
}

/* ---- reading and writing masters ----------------------------------------------------------------
 */

enum { HALVES = 1 << 16 }; /* elements split or joined on the host at a time */

mt_status mt_param_read_master(const mt_param_store *store, const mt_param *p, int64_t first,
                               int64_t count, void *host)
{
    size_t size = mt_dtype_size(p->dtype);
    MT_REQUIRE(count >= 0, MT_EINVAL, "%s: %lld elements of the master, must not be negative",
               p->name, (long long)count);
    MT_REQUIRE(first >= p->own.first && first + count <= p->own.first + p->own.count, MT_EINVAL,
               "%s: elements [%lld, %lld) of the master are not all on this rank, which has [%lld, "
               "%lld)",
               p->name, (long long)first, (long long)(first + count), (long long)p->own.first,
               (long long)(p->own.first + p->own.count));
    first -= p->own.first;
    if (p->own_master)
        return mt_device_copy(store->device, host,
                              (const char *)p->own_master + (size_t)first * size,
                              (size_t)count * size);
    uint16_t high[HALVES];
    int16_t low[HALVES];
    for (int64_t at = 0; at < count; at += HALVES) {
        int64_t n = count - at < HALVES ? count - at : HALVES;
        MT_TRY(mt_device_copy(store->device, high, p->high + first + at, (size_t)n * sizeof *high));
        MT_TRY(mt_device_copy(store->device, low, p->low + first + at, (size_t)n * sizeof *low));
        for (int64_t i = 0; i < n; i++)
            ((float *)host)[at + i] = mt_f32_from_bits(mt_master_join(high[i], low[i]));
    }
    return MT_OK;
}

mt_status mt_param_write_master(mt_param_store *store, mt_param *p, int64_t first, int64_t count,
                                const void *host)
{
    size_t size = mt_dtype_size(p->dtype);
    int64_t begin = first > p->own.first ? first : p->own.first;
    int64_t end = p->own.first + p->own.count;
    if (first + count < end) end = first + count;
    if (begin >= end) return MT_OK;
    host = (const char *)host + (size_t)(begin - first) * size;
    first = begin - p->own.first, count = end - begin;
    p->cast_written = false;
    if (p->own_master)
        return mt_device_copy(store->device, (char *)p->own_master + (size_t)first * size, host,
                              (size_t)count * size);
    uint16_t high[HALVES];
    int16_t low[HALVES];
    for (int64_t at = 0; at < count; at += HALVES) {
        int64_t n = count - at < HALVES ? count - at : HALVES;
#pragma omp parallel for schedule(dynamic, 4096) if (n > 4096)
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = mt_f32_bits(((const float *)host)[at + i]);
            high[i] = mt_master_high(bits), low[i] = mt_master_low(bits);
        }
        MT_TRY(mt_device_copy(store->device, p->high + first + at, high, (size_t)n * sizeof *high));
        MT_TRY(mt_device_copy(store->device, p->low + first + at, low, (size_t)n * sizeof *low));
    }
    return MT_OK;
}

mt_status mt_param_split_view(mt_param_store *store, mt_param *p)
{
    float joined[HALVES];
    for (int64_t at = 0; at < p->own.count; at += HALVES) {
        int64_t n = p->own.count - at < HALVES ? p->own.count - at : HALVES;
        MT_TRY(mt_device_copy(store->device, joined, p->view + at, (size_t)n * sizeof *joined));
        MT_TRY(mt_param_write_master(store, p, p->own.first + at, n, joined));
    }
    return MT_OK;
}

/* ---- reading the store -------------------------------------------------------------------------
 */

mt_device *mt_param_store_device(const mt_param_store *store)
{
    return store->device;
}

int64_t mt_param_store_count(const mt_param_store *store)
{
    return store->count;
}

mt_param *mt_param_store_get(const mt_param_store *store, int64_t i)
{
    return store->params[i];
}

mt_param *mt_param_store_find(const mt_param_store *store, const char *name)
{
    for (int64_t i = 0; i < store->count; i++)
        if (!strcmp(store->params[i]->name, name)) return store->params[i];
    return NULL;
}

mt_status mt_param_store_check_pattern(const mt_param_store *store, const char *key,
                                       const char *pattern)
{
    enum { NAMES = 400 };
    char names[NAMES] = "";
    size_t used = 0;
    for (int64_t i = 0; i < store->count; i++) {
        const char *name = store->params[i]->name;
        if (!store->params[i]->packed) continue;
        if (fnmatch(pattern, name, 0) == 0) return MT_OK;
        if (used + strlen(name) + 2 < NAMES)
            used += (size_t)snprintf(names + used, NAMES - used, "%s%s", used ? " " : "", name);
    }
    return MT_FAIL(MT_ECONFIG, "%s%s fits no linear layer; the first of them: %s", key, pattern,
                   names);
}

int64_t mt_param_store_elements(const mt_param_store *store)
{
    return store->elements;
}

void *mt_param_store_master(const mt_param_store *store)
{
    return store->master;
}

void *mt_param_store_grad(const mt_param_store *store)
{
    return store->grad;
}

mt_flat_grads mt_param_store_grads(const mt_param_store *s)
{
    int64_t reals = s->grad ? s->elements - s->bf16_elements : 0;
    const char *bf16 =
        s->grad ? (const char *)s->grad + (size_t)reals * mt_dtype_size(s->dtype) : NULL;
    return (mt_flat_grads){ s->grad, reals, (const uint16_t *)(const void *)bf16,
                            s->grad ? s->bf16_elements : 0 };
}

/* Draws `room` elements at a time on the host and uploads them: the same bits on every device. */
static mt_status init_param(mt_param_store *s, mt_param *p, uint32_t stream, uint64_t seed,
                            void *host, int64_t room)
{
    int64_t n;
    for (int64_t at = p->own.first; at < p->own.first + p->own.count; at += n) {
        uint64_t first = (uint64_t)(mt_param_base(p) + at);
        n = p->own.first + p->own.count - at;
        if (n > room) n = room;
#pragma omp parallel for schedule(dynamic, 4096) if (n > 4096)
        for (int64_t i = 0; i < n; i++) {
            double x = p->init == MT_INIT_ZERO ? 0
                       : p->init == MT_INIT_ONE
                           ? 1
                           : p->init_std * mt_rng_normal(seed, stream, first + (uint64_t)i);
            /* f64 runs start from the f32 weights */
            mt_store_f64(host, p->dtype, i, (double)(float)x);
        }
        MT_TRY(mt_param_write_master(s, p, at, n, host));
    }
    return MT_OK;
}

mt_status mt_param_store_init(mt_param_store *store, uint64_t seed)
{
    enum { ROOM = 1 << 22 };
    if (!store->device->computes) return MT_OK;
    int64_t room = store->elements < ROOM ? store->elements : ROOM;
    void *host = malloc((size_t)(room + 1) * mt_dtype_size(store->dtype));
    mt_status status = host ? MT_OK : MT_FAIL(MT_ENOMEM, "initial values: out of memory");
    for (int64_t i = 0; status == MT_OK && i < store->count; i++)
        status = init_param(store, store->params[i], (uint32_t)i, seed, host, room);
    free(host);
    return status;
}

void mt_param_store_begin_step(mt_param_store *store)
{
    for (int64_t i = 0; i < store->count; i++) store->params[i]->grad_started = false;
}

mt_status mt_param_store_end_step(mt_param_store *store)
{
    for (int64_t i = 0; i < store->count; i++) {
        mt_param *p = store->params[i];
        if (p->grad_started || !p->grad) continue;
        MT_TRY(mt_device_zero(store->device, p->grad,
                              (size_t)mt_param_count(p) * mt_dtype_size(p->grad_dtype)));
        p->grad_started = true;
    }
    return MT_OK;
}
