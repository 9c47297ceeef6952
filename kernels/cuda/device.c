/* The cuda device: memory, its stream, errors. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/backends.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/device_priv.h"
#include "kernels/cuda/fold.h"
#include "kernels/cuda/quantize_path.h"

static const mt_dtype compute_dtypes[MT_CUDA_COMPUTE_DTYPES] = { MT_F64, MT_F32, MT_BF16 };

static struct cuda *cuda_of(const mt_device *device)
{
    return device->impl;
}

/* ---- errors -----------------------------------------------------------------------------------
 */

/* Faults of a kernel, which the first call that waits for it hears of, and every call after. */
static bool is_fault(cudaError_t error)
{
    static const cudaError_t faults[] = { cudaErrorIllegalAddress,      cudaErrorLaunchFailure,
                                          cudaErrorMisalignedAddress,   cudaErrorIllegalInstruction,
                                          cudaErrorInvalidPc,           cudaErrorAssert,
                                          cudaErrorInvalidAddressSpace, cudaErrorLaunchTimeout,
                                          cudaErrorHardwareStackError,  cudaErrorECCUncorrectable };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        if (error == faults[i]) return true;
    return false;
}

mt_status mt_cuda_error(cudaError_t error, const char *call, const char *file, int line)
{
    const char *sync = getenv("MT_SYNC");
    bool named = !is_fault(error) || (sync && *sync == '1');
    (void)cudaGetLastError(); /* what can be cleared is; a broken context stays broken */
    return mt_error_set(
        error == cudaErrorMemoryAllocation ? MT_ENOMEM : MT_EDEVICE, file, line,
        "cuda: %s: %s (%s)%s", call, cudaGetErrorString(error), cudaGetErrorName(error),
        named ? "" : "; a kernel before it: run again with MT_SYNC=1, which names it");
}

mt_status mt_cuda_launched(mt_stream *stream, const char *op, const char *file, int line)
{
    cudaError_t error = cudaPeekAtLastError();
    if (error == cudaSuccess && cuda_of(stream->device)->synchronous)
        error = cudaStreamSynchronize(mt_cuda_stream(stream));
    return error == cudaSuccess ? MT_OK : mt_cuda_error(error, op, file, line);
}

/* ---- what kernels ask ---------------------------------------------------------------------------
 */

cudaStream_t mt_cuda_stream(const mt_stream *stream)
{
    return stream->impl ? (cudaStream_t)stream->impl : cuda_of(stream->device)->stream;
}

int mt_cuda_multiprocessors(const mt_stream *stream)
{
    return cuda_of(stream->device)->multiprocessors;
}

void mt_cuda_quantize_in_strips(mt_device *device, bool always)
{
    cuda_of(device)->in_strips = always;
}

bool mt_cuda_in_strips(const mt_stream *stream)
{
    return cuda_of(stream->device)->in_strips;
}

int mt_cuda_block_shared(const mt_stream *stream)
{
    return cuda_of(stream->device)->shared;
}

void mt_cuda_limit_shared(mt_device *device, int bytes)
{
    cuda_of(device)->shared = bytes;
}

int mt_cuda_shared(const mt_device *device)
{
    return cuda_of(device)->shared;
}

mt_status mt_cuda_give_shared(const mt_stream *stream, const void *kernel, size_t bytes,
                              const char *what)
{
    const int most = mt_cuda_block_shared(stream);
    MT_REQUIRE(bytes <= (size_t)most, MT_EDEVICE,
               "%s: a block needs %zu bytes of shared memory, the GPU has at most %d", what, bytes,
               most);
    MT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    return MT_OK;
}

void mt_cuda_spare(mt_device *device, int count)
{
    struct cuda *cuda = cuda_of(device);
    int most = cuda->processors / 2;
    cuda->multiprocessors = cuda->processors - (count < most ? count : most);
}

bool mt_cuda_is_hopper(const mt_stream *stream)
{
    return cuda_of(stream->device)->hopper;
}

bool mt_cuda_reads_fp8(const mt_stream *stream)
{
    return cuda_of(stream->device)->fp8;
}

mt_cublaslt *mt_cuda_cublaslt(const mt_stream *stream)
{
    return cuda_of(stream->device)->lt;
}

/* ---- memory -----------------------------------------------------------------------------------
 */

/* Out of memory is a status without a sentence of its own: mt_device_alloc knows the purpose. */
static mt_status cuda_alloc(mt_device *device, void **p, size_t bytes, bool on_host)
{
    (void)device;
    cudaError_t error =
        on_host ? cudaHostAlloc(p, bytes, cudaHostAllocDefault) : cudaMalloc(p, bytes);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return MT_ENOMEM;
    }
    MT_CUDA(error);
    return MT_OK;
}

static void cuda_release(mt_device *device, void *p, size_t bytes, bool on_host)
{
    (void)device, (void)bytes;
    (void)(on_host ? cudaFreeHost(p) : cudaFree(p));
}

static mt_status cuda_copy(mt_device *device, void *to, const void *from, size_t bytes)
{
    cudaStream_t stream = cuda_of(device)->stream;
    MT_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
    MT_CUDA(cudaStreamSynchronize(stream));
    return MT_OK;
}

static mt_status cuda_copy_async(mt_stream *stream, void *to, const void *from, size_t bytes)
{
    MT_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, mt_cuda_stream(stream)));
    return MT_OK;
}

static mt_status cuda_zero(mt_device *device, void *p, size_t bytes)
{
    MT_CUDA(cudaMemsetAsync(p, 0, bytes, cuda_of(device)->stream));
    if (cuda_of(device)->synchronous) MT_CUDA(cudaStreamSynchronize(cuda_of(device)->stream));
    return MT_OK;
}

static mt_status cuda_zero_async(mt_stream *stream, void *p, size_t bytes)
{
    MT_CUDA(cudaMemsetAsync(p, 0, bytes, mt_cuda_stream(stream)));
    return MT_OK;
}

static mt_status cuda_copy_lines(mt_stream *stream, const struct mt_copy_lines *c)
{
    MT_CUDA(cudaMemcpy2DAsync(c->to, c->to_pitch, c->from, c->from_pitch, c->bytes,
                              (size_t)c->lines, cudaMemcpyDefault, mt_cuda_stream(stream)));
    return MT_OK;
}

/* ---- streams and events -----------------------------------------------------------------------
 */

static mt_status cuda_stream_create(mt_device *device, void **stream)
{
    (void)device;
    int least = 0, greatest = 0;
    cudaStream_t made = NULL;
    MT_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    MT_CUDA(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest));
    *stream = made;
    return MT_OK;
}

static void cuda_stream_destroy(mt_device *device, void *stream)
{
    (void)cudaStreamSynchronize((cudaStream_t)stream);
    mt_cuda_leave_lane(device, stream);
    (void)cudaStreamDestroy((cudaStream_t)stream);
}

static mt_status cuda_stream_synchronize(mt_stream *stream)
{
    MT_CUDA(cudaStreamSynchronize(mt_cuda_stream(stream)));
    return MT_OK;
}

static mt_status cuda_event_create(mt_device *device, void **event)
{
    (void)device;
    cudaEvent_t made = NULL;
    MT_CUDA(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
    *event = made;
    return MT_OK;
}

static void cuda_event_destroy(mt_device *device, void *event)
{
    (void)device;
    (void)cudaEventDestroy((cudaEvent_t)event);
}

static mt_status cuda_event_record(mt_stream *stream, void *event)
{
    MT_CUDA(cudaEventRecord((cudaEvent_t)event, mt_cuda_stream(stream)));
    return MT_OK;
}

static mt_status cuda_event_wait(mt_stream *stream, void *event)
{
    MT_CUDA(cudaStreamWaitEvent(mt_cuda_stream(stream), (cudaEvent_t)event, 0));
    return MT_OK;
}

/* On a thread that knows no device yet, the first call would open device 0. */
static mt_status cuda_event_done(mt_device *device, void *event, bool *done)
{
    MT_CUDA(cudaSetDevice(cuda_of(device)->index));
    cudaError_t error = cudaEventQuery((cudaEvent_t)event);
    *done = error != cudaErrorNotReady;
    if (error == cudaErrorNotReady)
        (void)cudaGetLastError();
    else
        MT_CUDA(error);
    return MT_OK;
}

/* ---- graphs -----------------------------------------------------------------------------------
 */

static mt_status cuda_graph_begin(mt_device *device)
{
    MT_CUDA(cudaStreamBeginCapture(cuda_of(device)->stream, cudaStreamCaptureModeThreadLocal));
    return MT_OK;
}

static mt_status cuda_graph_end(mt_device *device, void **graph, bool keep)
{
    cudaGraph_t recorded = NULL;
    cudaGraphExec_t ready = NULL;
    cudaError_t error = cudaStreamEndCapture(cuda_of(device)->stream, &recorded);
    if (error == cudaSuccess && keep) error = cudaGraphInstantiate(&ready, recorded, 0);
    if (recorded) (void)cudaGraphDestroy(recorded);
    if (!keep) (void)cudaGetLastError(); /* why it failed was said before */
    if (keep && error != cudaSuccess)
        return mt_cuda_error(error, "recording a graph", __FILE__, __LINE__);
    *graph = ready;
    return MT_OK;
}

static mt_status cuda_graph_launch(mt_device *device, void *graph)
{
    MT_CUDA(cudaGraphLaunch((cudaGraphExec_t)graph, cuda_of(device)->stream));
    return MT_OK;
}

static void cuda_graph_destroy(mt_device *device, void *graph)
{
    (void)cudaStreamSynchronize(cuda_of(device)->stream);
    (void)cudaGraphExecDestroy((cudaGraphExec_t)graph);
}

static mt_status cuda_synchronize(mt_device *device)
{
    (void)device;
    MT_CUDA(cudaDeviceSynchronize());
    return MT_OK;
}

struct timer {
    cudaEvent_t mark[2];
};

static void cuda_timer_destroy(mt_device *device, void *timer)
{
    (void)device;
    struct timer *t = timer;
    for (int i = 0; i < 2; i++)
        if (t->mark[i]) (void)cudaEventDestroy(t->mark[i]);
    free(t);
}

static mt_status cuda_timer_create(mt_device *device, void **timer)
{
    struct timer *t = calloc(1, sizeof *t);
    MT_REQUIRE(t, MT_ENOMEM, "device cuda: no %zu bytes for a timer", sizeof *t);
    for (int i = 0; i < 2; i++) {
        cudaError_t error = cudaEventCreate(&t->mark[i]);
        if (error == cudaSuccess) continue;
        cuda_timer_destroy(device, t);
        return mt_cuda_error(error, "cudaEventCreate", __FILE__, __LINE__);
    }
    *timer = t;
    return MT_OK;
}

static mt_status cuda_timer_mark(mt_stream *stream, void *timer, bool end)
{
    MT_CUDA(cudaEventRecord(((struct timer *)timer)->mark[end], mt_cuda_stream(stream)));
    return MT_OK;
}

static mt_status cuda_timer_read(mt_device *device, void *timer, double *seconds)
{
    (void)device;
    const struct timer *t = timer;
    float ms;
    MT_CUDA(cudaEventSynchronize(t->mark[1]));
    MT_CUDA(cudaEventElapsedTime(&ms, t->mark[0], t->mark[1]));
    *seconds = 1e-3 * (double)ms;
    return MT_OK;
}

static void cuda_destroy(mt_device *device)
{
    struct cuda *cuda = cuda_of(device);
    mt_device_free(device, &cuda->scratch.p, cuda->scratch.bytes, MT_MEMORY_WORKSPACE);
    mt_device_free(device, &cuda->operands.p, cuda->operands.bytes, MT_MEMORY_WORKSPACE);
    if (cuda->stream) (void)cudaStreamDestroy(cuda->stream);
    mt_cublaslt_close(&cuda->lt);
    free(cuda);
}

static const struct mt_device_ops cuda_ops = {
    .alloc = cuda_alloc,
    .release = cuda_release,
    .copy = cuda_copy,
    .copy_async = cuda_copy_async,
    .zero = cuda_zero,
    .synchronize = cuda_synchronize,
    .copy_lines = cuda_copy_lines,
    .zero_async = cuda_zero_async,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_synchronize = cuda_stream_synchronize,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_wait = cuda_event_wait,
    .event_done = cuda_event_done,
    .graph_begin = cuda_graph_begin,
    .graph_end = cuda_graph_end,
    .graph_launch = cuda_graph_launch,
    .graph_destroy = cuda_graph_destroy,
    .timer_create = cuda_timer_create,
    .timer_destroy = cuda_timer_destroy,
    .timer_mark = cuda_timer_mark,
    .timer_read = cuda_timer_read,
    .destroy = cuda_destroy,
};

/* ---- opening ----------------------------------------------------------------------------------
 */

/* Best first. */
const struct mt_cuda_set mt_cuda_sets[MT_CUDA_SET_COUNT] = {
    [MT_CUDA_SET_sm_90a] = { "sm_90a", 90, 90, "native wgmma bf16, TMA", .hopper = true },
    [MT_CUDA_SET_sm_90a_fp8] = { "sm_90a_fp8", 90, 90, "native wgmma bf16 and fp8, TMA",
                                 .by_name = true, .hopper = true, .fp8 = true },
    [MT_CUDA_SET_cublaslt_grouped] = { "cublaslt_grouped", 90, 119, "native wgmma bf16, TMA",
                                       .hopper = true, .cublaslt = true, .groups = MT_LT_GROUPED },
    [MT_CUDA_SET_cublaslt] = { "cublaslt", 80, INT_MAX, "native wgmma bf16, TMA", .hopper = true,
                               .cublaslt = true, .groups = MT_LT_OURS },
    [MT_CUDA_SET_cublaslt_loop] = { "cublaslt_loop", 80, INT_MAX, "native wgmma bf16, TMA",
                                    .by_name = true, .hopper = true, .cublaslt = true,
                                    .groups = MT_LT_LOOP },
    [MT_CUDA_SET_generic] = { "generic", 80, INT_MAX, "tiled bf16" },
};

/* A set that runs on the card, with cuBLASLt opened where it has it. One that was not asked for by
 * its name gives way to the next. */
static mt_status choose_set(const struct mt_cuda_set **set, mt_cublaslt **lt,
                            const struct cudaDeviceProp *card, const char *name)
{
#define NAME(x) " " #x
    static const char names[] = MT_CUDA_SETS(NAME);
#undef NAME
    int capability = card->major * 10 + card->minor;
    bool named = name && *name;
    *lt = NULL;
    for (int i = 0; i < MT_CUDA_SET_COUNT; i++) {
        const struct mt_cuda_set *s = &mt_cuda_sets[i];
        bool runs = capability >= s->least && capability <= s->most;
        if (named ? strcmp(name, s->name) != 0 : !runs || s->by_name) continue;
        MT_REQUIRE(runs, MT_EDEVICE, "kernel set %s does not run on %s, compute capability %d.%d",
                   name, card->name, card->major, card->minor);
        mt_status status = s->cublaslt ? mt_cublaslt_open(lt, s->groups, capability) : MT_OK;
        if (named && status != MT_OK) return mt_error_pass(status, __FILE__, __LINE__);
        *set = s;
        if (status == MT_OK) return MT_OK;
        mt_error_clear();
    }
    MT_REQUIRE(!named, MT_ECONFIG, "kernel set '%s' is not one of%s on cuda", name, names);
    return MT_FAIL(MT_EDEVICE, "cuda: %s has compute capability %d.%d, at least 8.0 is needed",
                   card->name, card->major, card->minor);
}

static mt_status count_cards(int *count)
{
    *count = 0;
    cudaError_t error = cudaGetDeviceCount(count);
    if (error == cudaErrorInsufficientDriver) {
        int driver = 0, runtime = 0;
        (void)cudaDriverGetVersion(&driver);
        (void)cudaRuntimeGetVersion(&runtime);
        return MT_FAIL(MT_EDEVICE,
                       driver ? "cuda: the driver supports CUDA %d.%d, this build needs %d.%d"
                              : "cuda: no driver of NVIDIA is installed",
                       driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    }
    MT_REQUIRE(error == cudaSuccess && *count > 0, MT_EDEVICE, "cuda: no GPU was found (%s)",
               cudaGetErrorString(error));
    return MT_OK;
}

mt_status mt_cuda_select(int index)
{
    int count;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    MT_TRY(count_cards(&count));
    MT_REQUIRE(index >= 0 && index < count, MT_EDEVICE,
               "cuda: GPU %d is not one of the %d that this process sees%s%.100s", index, count,
               visible ? ", CUDA_VISIBLE_DEVICES=" : "", visible ? visible : "");
    MT_CUDA(cudaSetDevice(index));
    return MT_OK;
}

mt_status mt_cuda_count(int *count)
{
    return count_cards(count);
}

static mt_status find_card(struct cudaDeviceProp *card, int *current)
{
    int count;
    MT_TRY(count_cards(&count));
    MT_CUDA(cudaGetDevice(current));
    MT_CUDA(cudaGetDeviceProperties(card, *current));
    return MT_OK;
}

/* ---- for plans ----------------------------------------------------------------------------------
 */

const char *mt_cuda_usual_set(void)
{
    struct cudaDeviceProp card;
    const struct mt_cuda_set *set = &mt_cuda_sets[0];
    mt_cublaslt *lt = NULL;
    int index;
    if (find_card(&card, &index) != MT_OK || choose_set(&set, &lt, &card, NULL) != MT_OK)
        mt_error_clear();
    mt_cublaslt_close(&lt);
    return set->name;
}

int mt_cuda_processors(int *capability, int *shared)
{
    struct cudaDeviceProp card = { .major = 0 };
    int index;
    if (find_card(&card, &index) != MT_OK) mt_error_clear();
    *capability = card.major * 10 + card.minor;
    *shared = (int)card.sharedMemPerBlockOptin;
    return card.multiProcessorCount;
}

/* What follows from the kernel set. */
static void take_set(struct cuda *cuda, const struct mt_cuda_set *set,
                     const struct cudaDeviceProp *card)
{
    static const struct mt_kernels *const tables[MT_CUDA_COMPUTE_DTYPES] = {
        &mt_cuda_kernels_f64, &mt_cuda_kernels_f32, &mt_cuda_kernels_bf16
    };
    cuda->hopper = set->hopper && card->major == 9 && card->minor == 0, cuda->fp8 = set->fp8;
    snprintf(cuda->gemm_path, sizeof cuda->gemm_path, "%s%s%s",
             cuda->lt ? mt_cublaslt_text(cuda->lt) : "", cuda->lt ? ": " : "",
             set->hopper && !cuda->hopper ? mt_cuda_sets[MT_CUDA_SET_generic].gemm_path
                                          : set->gemm_path);
    for (int i = 0; i < MT_CUDA_COMPUTE_DTYPES; i++) {
        struct mt_kernels *k = &cuda->kernels[i];
        *k = *tables[i];
        const char *wide = mt_cuda_wide_gemm_path(compute_dtypes[i], cuda->hopper);
        k->gemm_path = wide ? wide : cuda->gemm_path;
        if (compute_dtypes[i] == MT_BF16) k->gemm_chosen = mt_cuda_gemm_chosen_bf16;
        if (set->fp8 && compute_dtypes[i] == MT_BF16) k->gemm_codes = mt_cuda_gemm_reads_codes;
        if (cuda->hopper && set->groups == MT_LT_OURS && compute_dtypes[i] == MT_BF16)
            k->weighs_after = mt_cuda_weighs_after;
        cuda->device.kernels[compute_dtypes[i]] = k;
    }
}

/* Dense, by the makers' data sheets. */
static double bf16_flops(const char *card)
{
    static const struct {
        const char *name;
        double tera;
    } known[] = { { "A100", 312 },   { "H100 PCIe", 756 }, { "H100 NVL", 835 },
                  { "H100", 989.4 }, { "H200 NVL", 835 },  { "H200", 989.4 } };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strstr(card, known[i].name)) return known[i].tera * 1e12;
    return 0;
}

mt_status mt_cuda_open(mt_device **device, const char *kernel_set, int threads)
{
    struct cudaDeviceProp card;
    const struct mt_cuda_set *set = NULL;
    mt_cublaslt *lt;
    int index;
    if (!kernel_set) kernel_set = mt_kernel_set_asked("cuda");
    MT_TRY(find_card(&card, &index));
    MT_TRY(choose_set(&set, &lt, &card, kernel_set));
    struct cuda *cuda = calloc(1, sizeof *cuda);
    if (!cuda) {
        mt_cublaslt_close(&lt);
        return MT_FAIL(MT_ENOMEM, "device cuda: no %zu bytes for itself", sizeof *cuda);
    }
    const char *sync = getenv("MT_SYNC");
    cuda->synchronous = sync && *sync == '1';
    cuda->ops = cuda_ops;
    /* What is recorded cannot be waited for, nor read back. */
    if (cuda->synchronous || (lt && mt_cublaslt_groups(lt) == MT_LT_LOOP))
        cuda->ops.graph_begin = NULL;
    cuda->index = index, cuda->lt = lt;
    cuda->processors = cuda->multiprocessors = card.multiProcessorCount;
    cuda->shared = (int)card.sharedMemPerBlockOptin;
    cuda->device = (mt_device){ .name = "cuda",
                                .kernel_set = set->name,
                                .computes = true,
                                .threads = threads > 0 ? threads : 1,
                                .bf16_flops = bf16_flops(card.name),
                                .ops = &cuda->ops,
                                .impl = cuda };
    take_set(cuda, set, &card);
    if (lt)
        cuda->device.bytes[MT_MEMORY_WORKSPACE] = cuda->device.peak[MT_MEMORY_WORKSPACE] =
            (int64_t)mt_cublaslt_bytes(lt);
    cudaError_t error = cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking);
    if (error != cudaSuccess) {
        mt_status status = mt_cuda_error(error, "cudaStreamCreateWithFlags", __FILE__, __LINE__);
        mt_cublaslt_close(&cuda->lt);
        free(cuda);
        return status;
    }
    *device = &cuda->device;
    return MT_OK;
}
