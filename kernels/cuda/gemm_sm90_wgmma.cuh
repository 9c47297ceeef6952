/* wgmma with f32 sums, both operands in shared memory: 64 rows, N columns, 32 bytes deep, for every
 * N that is a multiple of 8 up to 192. The sums may be an array larger than N / 2: a narrow
 * instruction uses its front, so that one array serves every width. */
#pragma once

#include <stdint.h>

enum { WGMMA_MOST = 192, WGMMA_SUMS = WGMMA_MOST / 2 };

/* The registers of the sums, in the text of the instruction and as operands of asm. */
#define D4(i)    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TEXT_8   "%0, %1, %2, %3"
#define TEXT_16  TEXT_8 ", %4, %5, %6, %7"
#define TEXT_24  TEXT_16 ", %8, %9, %10, %11"
#define TEXT_32  TEXT_24 ", %12, %13, %14, %15"
#define TEXT_40  TEXT_32 ", %16, %17, %18, %19"
#define TEXT_48  TEXT_40 ", %20, %21, %22, %23"
#define TEXT_56  TEXT_48 ", %24, %25, %26, %27"
#define TEXT_64  TEXT_56 ", %28, %29, %30, %31"
#define TEXT_72  TEXT_64 ", %32, %33, %34, %35"
#define TEXT_80  TEXT_72 ", %36, %37, %38, %39"
#define TEXT_88  TEXT_80 ", %40, %41, %42, %43"
#define TEXT_96  TEXT_88 ", %44, %45, %46, %47"
#define TEXT_104 TEXT_96 ", %48, %49, %50, %51"
#define TEXT_112 TEXT_104 ", %52, %53, %54, %55"
#define TEXT_120 TEXT_112 ", %56, %57, %58, %59"
#define TEXT_128 TEXT_120 ", %60, %61, %62, %63"
#define TEXT_136 TEXT_128 ", %64, %65, %66, %67"
#define TEXT_144 TEXT_136 ", %68, %69, %70, %71"
#define TEXT_152 TEXT_144 ", %72, %73, %74, %75"
#define TEXT_160 TEXT_152 ", %76, %77, %78, %79"
#define TEXT_168 TEXT_160 ", %80, %81, %82, %83"
#define TEXT_176 TEXT_168 ", %84, %85, %86, %87"
#define TEXT_184 TEXT_176 ", %88, %89, %90, %91"
#define TEXT_192 TEXT_184 ", %92, %93, %94, %95"
#define SUMS_8   D4(0)
#define SUMS_16  SUMS_8, D4(4)
#define SUMS_24  SUMS_16, D4(8)
#define SUMS_32  SUMS_24, D4(12)
#define SUMS_40  SUMS_32, D4(16)
#define SUMS_48  SUMS_40, D4(20)
#define SUMS_56  SUMS_48, D4(24)
#define SUMS_64  SUMS_56, D4(28)
#define SUMS_72  SUMS_64, D4(32)
#define SUMS_80  SUMS_72, D4(36)
#define SUMS_88  SUMS_80, D4(40)
#define SUMS_96  SUMS_88, D4(44)
#define SUMS_104 SUMS_96, D4(48)
#define SUMS_112 SUMS_104, D4(52)
#define SUMS_120 SUMS_112, D4(56)
#define SUMS_128 SUMS_120, D4(60)
#define SUMS_136 SUMS_128, D4(64)
#define SUMS_144 SUMS_136, D4(68)
#define SUMS_152 SUMS_144, D4(72)
#define SUMS_160 SUMS_152, D4(76)
#define SUMS_168 SUMS_160, D4(80)
#define SUMS_176 SUMS_168, D4(84)
#define SUMS_184 SUMS_176, D4(88)
#define SUMS_192 SUMS_184, D4(92)

/* X(width, and the places of what follows the sums among the operands) */
#define WGMMA_WIDTHS(X)                                                                            \
    X(8, "%4", "%5", "%6", "%7", "%8")                                                             \
    X(16, "%8", "%9", "%10", "%11", "%12")                                                         \
    X(24, "%12", "%13", "%14", "%15", "%16")                                                       \
    X(32, "%16", "%17", "%18", "%19", "%20")                                                       \
    X(40, "%20", "%21", "%22", "%23", "%24")                                                       \
    X(48, "%24", "%25", "%26", "%27", "%28")                                                       \
    X(56, "%28", "%29", "%30", "%31", "%32")                                                       \
    X(64, "%32", "%33", "%34", "%35", "%36")                                                       \
    X(72, "%36", "%37", "%38", "%39", "%40")                                                       \
    X(80, "%40", "%41", "%42", "%43", "%44")                                                       \
    X(88, "%44", "%45", "%46", "%47", "%48")                                                       \
    X(96, "%48", "%49", "%50", "%51", "%52")                                                       \
    X(104, "%52", "%53", "%54", "%55", "%56")                                                      \
    X(112, "%56", "%57", "%58", "%59", "%60")                                                      \
    X(120, "%60", "%61", "%62", "%63", "%64")                                                      \
    X(128, "%64", "%65", "%66", "%67", "%68")                                                      \
    X(136, "%68", "%69", "%70", "%71", "%72")                                                      \
    X(144, "%72", "%73", "%74", "%75", "%76")                                                      \
    X(152, "%76", "%77", "%78", "%79", "%80")                                                      \
    X(160, "%80", "%81", "%82", "%83", "%84")                                                      \
    X(168, "%84", "%85", "%86", "%87", "%88")                                                      \
    X(176, "%88", "%89", "%90", "%91", "%92")                                                      \
    X(184, "%92", "%93", "%94", "%95", "%96")                                                      \
    X(192, "%96", "%97", "%98", "%99", "%100")

/* d = A B + (add ? d : 0), of bf16. ACROSS_*: the operand's lines run across the depth. */
template <int N, int ACROSS_A, int ACROSS_B, int SUMS>
static __device__ __forceinline__ void wgmma(float (&d)[SUMS], uint64_t a_desc, uint64_t b_desc,
                                             int add)
{
    static_assert(N % 8 == 0 && N > 0 && N <= WGMMA_MOST && SUMS >= N / 2, "not a width of wgmma");
#define WGMMA(n, a, b, scale, ta, tb)                                                              \
    if constexpr (N == n)                                                                          \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " scale ", 0;\n"                            \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" TEXT_##n         \
                     "}, " a ", " b ", p, 1, 1, " ta ", " tb ";\n}\n"                              \
                     : SUMS_##n                                                                    \
                     : "l"(a_desc), "l"(b_desc), "r"(add), "n"(ACROSS_A), "n"(ACROSS_B));
    WGMMA_WIDTHS(WGMMA)
#undef WGMMA
}

/* The same of fp8 codes, 32 deep; lines run along the depth. A, B: their elements, E4M3 or not. */
enum { WGMMA_E4M3_E4M3, WGMMA_E4M3_E5M2, WGMMA_E5M2_E4M3, WGMMA_ELEMENTS };

template <int N, int ELEMENTS, int SUMS>
static __device__ __forceinline__ void wgmma_fp8(float (&d)[SUMS], uint64_t a_desc, uint64_t b_desc,
                                                 int add)
{
    static_assert(N % 8 == 0 && N > 0 && N <= WGMMA_MOST && SUMS >= N / 2, "not a width of wgmma");
#define WGMMA_OF(n, a, b, scale, types)                                                            \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " scale ", 0;\n"                                \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." types " {" TEXT_##n             \
                 "}, " a ", " b ", p, 1, 1;\n}\n"                                                  \
                 : SUMS_##n                                                                        \
                 : "l"(a_desc), "l"(b_desc), "r"(add))
#define WGMMA(n, a, b, scale, ta, tb)                                                              \
    if constexpr (N == n) {                                                                        \
        if constexpr (ELEMENTS == WGMMA_E4M3_E4M3) WGMMA_OF(n, a, b, scale, "e4m3.e4m3");          \
        if constexpr (ELEMENTS == WGMMA_E4M3_E5M2) WGMMA_OF(n, a, b, scale, "e4m3.e5m2");          \
        if constexpr (ELEMENTS == WGMMA_E5M2_E4M3) WGMMA_OF(n, a, b, scale, "e5m2.e4m3");          \
    }
    WGMMA_WIDTHS(WGMMA)
#undef WGMMA
#undef WGMMA_OF
}
/* The same of bf16 with A [64, 16] in registers: those of mma.m16n8k16, a warp for each 16 rows. */
template <int N, int ACROSS_B, int SUMS>
static __device__ __forceinline__ void wgmma_kept(float (&d)[SUMS], const uint32_t *a,
                                                  uint64_t b_desc, int add)
{
    static_assert((N == 64 || N == 128) && SUMS >= N / 2, "not a width of wgmma_kept");
#define WGMMA(n, a0, a1, a2, a3, b, scale, tb)                                                     \
    if constexpr (N == n)                                                                          \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " scale ", 0;\n"                            \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" TEXT_##n         \
                     "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b ", p, 1, 1, " tb ";\n}\n"           \
                     : SUMS_##n                                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_desc), "r"(add),          \
                       "n"(ACROSS_B));
    WGMMA(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
    WGMMA(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
#undef WGMMA
}
/* Until all but the last PENDING groups have been done; what the others wrote into the sums of N
 * columns is read after it. */
template <int N, int PENDING, int SUMS>
static __device__ __forceinline__ void wgmma_finish(float (&d)[SUMS])
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
    for (int i = 0; i < N / 2; i++) asm volatile("" : "+f"(d[i])::"memory");
}
#undef D4
