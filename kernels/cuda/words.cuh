/* Vectors of elements as the words they are stored in. What is asked for ahead stays words until it
 * is used: taken apart at once, it would be waited for at once. */
#pragma once

#include "kernels/cuda/element.cuh"

template <int BYTES> struct mt_word_of;
template <> struct mt_word_of<2> {
    typedef uint16_t type;
};
template <> struct mt_word_of<4> {
    typedef uint32_t type;
};
template <> struct mt_word_of<8> {
    typedef uint2 type;
};
template <> struct mt_word_of<16> {
    typedef uint4 type;
};
/* N elements of T: one access of at most 16 bytes. */
template <typename T, int N> using mt_words = typename mt_word_of<(int)sizeof(T) * N>::type;

template <int N, typename T> static __device__ __forceinline__ mt_words<T, N> mt_ask(const T *p)
{
    return *(const mt_words<T, N> *)p;
}
/* One store: an assignment of uint4 is at times compiled to four of its words. */
static __device__ __forceinline__ void mt_store(uint4 *p, const uint4 &words)
{
#ifdef __CUDA_ARCH__
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
#else
    *p = words;
#endif
}
template <typename W> static __device__ __forceinline__ void mt_store(W *p, const W &words)
{
    *p = words;
}
template <int N, typename T>
static __device__ __forceinline__ void mt_leave(T *p, const mt_words<T, N> &words)
{
    mt_store((mt_words<T, N> *)p, words);
}

/* Reals that words were opened to are not kept for another use: they are opened again. */
static __device__ __forceinline__ void mt_forget(uint4 &words)
{
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
#endif
}
template <typename W> static __device__ __forceinline__ void mt_forget(W &) {}

template <typename W> static __device__ __forceinline__ W mt_no_words()
{
    W words;
    memset(&words, 0, sizeof words);
    return words;
}

/* The elements of words as reals, and back, rounded as mt_put rounds. */
template <typename T, int N> struct mt_word_form {
    static __device__ __forceinline__ void open(mt_real<T> *x, const mt_words<T, N> &words)
    {
        mt_vec<T, N> v;
        memcpy(&v, &words, sizeof v);
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = mt_get(&v.at[j]);
    }
    static __device__ __forceinline__ mt_words<T, N> close(const mt_real<T> *x)
    {
        mt_vec<T, N> v;
        mt_words<T, N> words;
#pragma unroll
        for (int j = 0; j < N; j++) mt_put(&v.at[j], x[j]);
        memcpy(&words, &v, sizeof v);
        return words;
    }
};
/* Two elements a word: one instruction each to open them, one to round both. */
template <> struct mt_word_form<mt_bf16, 8> {
    static __device__ __forceinline__ void open(float *x, const uint4 &words)
    {
        const uint32_t in[4] = { words.x, words.y, words.z, words.w };
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[2 * j] = __uint_as_float(in[j] << 16);
            x[2 * j + 1] = __uint_as_float(in[j] & 0xffff0000u);
        }
    }
    static __device__ __forceinline__ uint4 close(const float *x)
    {
        uint32_t out[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * j], x[2 * j + 1]);
            memcpy(&out[j], &pair, sizeof pair);
        }
        return make_uint4(out[0], out[1], out[2], out[3]);
    }
};

template <typename T, int N>
static __device__ __forceinline__ void mt_open(mt_real<T> *x, const mt_words<T, N> &words)
{
    mt_word_form<T, N>::open(x, words);
}
template <typename T, int N>
static __device__ __forceinline__ mt_words<T, N> mt_close(const mt_real<T> *x)
{
    return mt_word_form<T, N>::close(x);
}

/* x as it reads back after being stored. */
template <typename T, int N> static __device__ __forceinline__ void mt_round(mt_real<T> *x)
{
    mt_open<T, N>(x, mt_close<T, N>(x));
}

/* Reads and writes of N elements as reals; an access is 16 bytes, or one element. */
template <int N, typename T>
static __device__ __forceinline__ void mt_get_vec(mt_real<T> *x, const T *p)
{
    enum { PIECE = N * sizeof(T) > 16 ? (int)(16 / sizeof(T)) : N };
#pragma unroll
    for (int j = 0; j < N; j += PIECE) mt_open<T, PIECE>(x + j, mt_ask<PIECE>(p + j));
}
/* Of what nobody writes while the kernel runs: such reads may move before its writes. */
template <int N, typename T>
static __device__ __forceinline__ void mt_get_constant(mt_real<T> *x, const T *p)
{
    enum { PIECE = N * sizeof(T) > 16 ? (int)(16 / sizeof(T)) : N };
#pragma unroll
    for (int j = 0; j < N; j += PIECE)
        mt_open<T, PIECE>(x + j, __ldg((const mt_words<T, PIECE> *)(p + j)));
}
template <int N, typename T>
static __device__ __forceinline__ void mt_put_vec(T *p, const mt_real<T> *x)
{
    enum { PIECE = N * sizeof(T) > 16 ? (int)(16 / sizeof(T)) : N };
#pragma unroll
    for (int j = 0; j < N; j += PIECE) mt_leave<PIECE>(p + j, mt_close<T, PIECE>(x + j));
}
