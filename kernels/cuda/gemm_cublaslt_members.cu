/* The arrays of cuBLASLt's grouped layouts, from the row counts on the device. */
#include "kernels/cuda/cublaslt_priv.h"
#include "kernels/cuda/gemm.cuh"

enum { THREADS = 128 };

/* A member without rows has nothing to multiply (TN, NN), or a gradient of zeros (NT): a sum over
 * MT_LT_ZERO_ROWS zeros, because no library need take kindly to sums of no terms. */
static __global__ void members_kernel(const __grid_constant__ mt_lt_members to,
                                      const __grid_constant__ mt_lt_product p)
{
    int64_t e = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (e == 0) to.scalars[0] = 1, to.scalars[1] = p.c ? 1 : 0;
    if (e >= p.rows.members) return;
    int64_t rows = mt_group_rows(&p.rows, e);
    bool empty = p.layout == MT_GEMM_NT && rows == 0;
    mt_lt_shape s = mt_lt_shape_of(p.layout, p.n, p.k, empty ? MT_LT_ZERO_ROWS : rows);
    mt_lt_place at = mt_lt_place_of(p.layout, p.n, p.k, e, gemm_start(&p.rows, e));
    size_t size = p.d_real ? sizeof(float) : sizeof(mt_bf16);
    to.a[e] = empty ? to.zeros : (const mt_bf16 *)p.a + at.a;
    to.b[e] = empty ? to.zeros : (const mt_bf16 *)p.b + at.b;
    to.d[e] = (char *)p.d + at.d * size;
    to.c[e] = p.c ? (const char *)p.c + at.d * size : (const char *)to.d[e];
    to.a_rows[e] = (int)s.a.rows, to.a_cols[e] = (int)s.a.cols;
    to.b_rows[e] = (int)s.b.rows, to.b_cols[e] = (int)s.b.cols;
    to.d_rows[e] = (int)s.d.rows, to.d_cols[e] = (int)s.d.cols;
}

extern "C" mt_status mt_lt_write_members(mt_stream *stream, const mt_lt_members *to,
                                         const mt_lt_product *p)
{
    unsigned blocks = (unsigned)mt_ceil_div(p->rows.members, THREADS);
    members_kernel<<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>(*to, *p);
    MT_LAUNCHED(stream, "gemm (cuBLASLt members)");
    return MT_OK;
}
