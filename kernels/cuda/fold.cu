/* Blocks of several ranks, folded into one in their order. */
#include "kernels/cuda/fold.h"

#include "kernels/cuda/element.cuh"

enum { THREADS = 256, LOAD = 16 };

/* What a type is summed in. */
template <typename T> struct summed {
    typedef T type;
};
template <> struct summed<mt_bf16> {
    typedef float type;
};

template <typename T> static __device__ __forceinline__ T widen(T x)
{
    return x;
}
static __device__ __forceinline__ float widen(mt_bf16 x)
{
    return __bfloat162float(x);
}
template <typename T> static __device__ __forceinline__ void narrow(T *y, T x)
{
    *y = x;
}
static __device__ __forceinline__ void narrow(mt_bf16 *y, float x)
{
    mt_put(y, x);
}

/* N elements at a time: count and stride are in these. Each thread reads its elements of every
 * block before it writes them. */
template <typename T, int N, bool LARGEST>
static __global__ void fold_kernel(mt_vec<T, N> *to, const mt_vec<T, N> *from, int blocks,
                                   int64_t stride, int64_t count, const mt_vec<T, N> *apart,
                                   int apart_block)
{
    typedef typename summed<T>::type S;
    MT_GRID_STRIDE(i, count)
    {
        S sum[N];
#pragma unroll 4
        for (int b = 0; b < blocks; b++) {
            mt_vec<T, N> in = apart && b == apart_block ? apart[i] : from[b * stride + i];
#pragma unroll
            for (int j = 0; j < N; j++) {
                S x = widen(in.at[j]);
                if (b == 0)
                    sum[j] = x;
                else if (!LARGEST)
                    sum[j] = sum[j] + x;
                else if (x > sum[j] || x != x)
                    sum[j] = x;
            }
        }
        mt_vec<T, N> out;
#pragma unroll
        for (int j = 0; j < N; j++) narrow(&out.at[j], sum[j]);
        to[i] = out;
    }
}

template <typename T, int N>
static void launch(mt_stream *stream, const struct mt_fold_args *a, int64_t first, int64_t count)
{
    unsigned blocks = mt_blocks(stream, count, THREADS);
    T *to = (T *)a->to + first;
    const T *from = (const T *)a->from + first;
    const T *apart = a->apart ? (const T *)a->apart + first : NULL;
    auto kernel = a->largest ? fold_kernel<T, N, true> : fold_kernel<T, N, false>;
    kernel<<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>(
        (mt_vec<T, N> *)to, (const mt_vec<T, N> *)from, a->blocks, a->stride / N, count,
        (const mt_vec<T, N> *)apart, a->apart_block);
}

template <typename T> static void fold(mt_stream *stream, const struct mt_fold_args *a)
{
    const int n = LOAD / (int)sizeof(T);
    uintptr_t places = (uintptr_t)a->to | (uintptr_t)a->from | (uintptr_t)a->apart;
    bool aligned = places % LOAD == 0 && a->stride % n == 0;
    int64_t wide = aligned ? a->count / n : 0;
    if (wide) launch<T, n>(stream, a, 0, wide);
    if (wide * n < a->count) launch<T, 1>(stream, a, wide * n, a->count - wide * n);
}

extern "C" mt_status mt_cuda_fold(mt_stream *stream, const struct mt_fold_args *args)
{
    static void (*const folds[MT_I32 + 1])(mt_stream *, const struct mt_fold_args *) = {
        fold<double>, fold<float>, fold<mt_bf16>, NULL, fold<int64_t>, fold<int32_t>
    };
    static_assert(MT_F64 == 0 && MT_F32 == 1 && MT_BF16 == 2 && MT_I64 == 4 && MT_I32 == 5,
                  "the order of `folds`");
    MT_REQUIRE((unsigned)args->dtype <= MT_I32 && folds[args->dtype], MT_EUNSUPPORTED,
               "comm: %s cannot be reduced", mt_dtype_name(args->dtype));
    if (args->count <= 0) return MT_OK;
    folds[args->dtype](stream, args);
    MT_LAUNCHED(stream, "fold");
    return MT_OK;
}
