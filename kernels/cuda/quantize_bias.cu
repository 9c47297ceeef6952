/* The bias gradient: from column sums of 128 rows of a member, which quantize's sweep over codes
 * leaves. */
#include "kernels/cuda/quantize_tile.cuh"

enum { THREADS = 256 };

/* The member of a column, all members' being counted. */
static __device__ int64_t column_member(const plan &p, int64_t column)
{
    int64_t low = 0, high = p.group.members;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (p.members[middle].at[AT_COLUMN] <= column)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static __global__ void bias_kernel(const __grid_constant__ plan p, const float *sums, float *db,
                                   bool accumulate)
{
    MT_GRID_STRIDE(i, p.members[p.group.members].at[AT_COLUMN])
    {
        const member *m = p.members + column_member(p, i);
        int64_t parts = shift_up(m->rows, 7), cols = m->cols;
        if (parts == 0) {
            if (!accumulate) db[i] = 0;
            continue;
        }
        const float *part = sums + m->at[AT_SUMS] + (i - m->at[AT_COLUMN]);
        float sum = part[0];
        for (int64_t k = 1; k < parts; k++) sum += part[k * cols];
        db[i] = (accumulate ? db[i] : 0) + sum;
    }
}

mt_status mt_cuda_quantize_bias(mt_stream *stream, const job *j, float *db, bool accumulate)
{
    enum { PER_MULTIPROCESSOR = 4 };
    const unsigned blocks = (unsigned)mt_cuda_multiprocessors(stream) * PER_MULTIPROCESSOR;
    bias_kernel<<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>(j->p, j->sums, db, accumulate);
    MT_LAUNCHED(stream, "quantize: bias gradient");
    return MT_OK;
}
