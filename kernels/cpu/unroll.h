/* Before a loop of constant length over registers: unrolled early enough for its array to live in
 * registers, and for a loop around it to become vectors. */
#pragma once

#ifdef __clang__
#define MT_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MT_UNROLL _Pragma("GCC unroll 32")
#endif
