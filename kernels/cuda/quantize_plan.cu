/* Members and directions of quantize and dequantize as kernels want them. */
#include "kernels/cuda/quantize_strips.cuh"
#include "kernels/cuda/quantize_tile.cuh"

side mt_cuda_side_of(const mt_direction *d, mt_dir dir, bool reading)
{
    side s = {};
    const mt_format *f = d->format;
    s.dir = dir;
    s.present = f != NULL;
    if (!f) return s;
    const mt_element_info *e = &mt_elements[d->options.element];
    s.codes = (uint8_t *)d->codes;
    s.scales = (uint8_t *)d->scales;
    s.amax = d->amax;
    s.options = d->options;
    s.plain = f->element == MT_ELEMENT_PLAIN;
    s.dtype = f->dtype;
    s.scale = f->scale;
    s.codes_per_byte = f->codes_per_byte;
    if (s.plain) return s;
    s.codec = mt_codec_of(d->options.element);
    s.max = e->max;
    s.inverse = 1.0f / e->max;
    s.emax = e->emax;
    s.overflow = FLT_MAX;
    s.whole = f->block == 0;
    s.delayed = f->delayed;
    s.second_level = f->second_level;
    while (1 << s.block_shift < f->block) s.block_shift++;
    s.shared = d->options.two_d && f->scale == MT_SCALE_F32;
    s.square = d->options.two_d && (s.shared || !reading);
    s.transposed = dir == MT_COL && f->column_transposed;
    s.swizzled = d->swizzled;
    s.padded = d->layout == MT_LAYOUT_PADDED;
    s.decoded = d->layout == MT_LAYOUT_DECODED;
    if (s.decoded) s.dtype = MT_BF16;
    s.block_major = f->block_major[dir] && !s.shared;
    return s;
}

int64_t mt_cuda_plan_blocks(const mt_group *g, int64_t a, int64_t b)
{
    /* sum of ceil(x_i / a) <= (sum x_i + (a - 1) N) / a, and <= sum x_i */
    int64_t n = g->members, rows = (g->m + (a - 1) * n) / a, cols = (g->k + (b - 1) * n) / b;
    switch (mt_group_mode_of(g)) {
    case MT_GROUP_UNIFORM: return n * mt_ceil_div(g->m, a) * mt_ceil_div(g->k, b);
    case MT_GROUP_VARYING_FIRST: return (rows < g->m ? rows : g->m) * mt_ceil_div(g->k, b);
    case MT_GROUP_VARYING_LAST: return mt_ceil_div(g->m, a) * (cols < g->k ? cols : g->k);
    case MT_GROUP_VARYING_BOTH: break;
    }
    return g->m * g->k; /* a member has at least one element for each product */
}

int64_t mt_cuda_plan_rows(const mt_group *g)
{
    return g->first_dims ? g->m : g->members * g->m;
}

int64_t mt_cuda_plan_units(const mt_group *g)
{
    return mt_cuda_plan_blocks(g, TILE, TILE);
}

int64_t mt_cuda_plan_strips(const mt_group *g, int64_t rows)
{
    return mt_cuda_plan_blocks(g, rows, g->k ? g->k : 1);
}

size_t mt_cuda_strip_bytes(int64_t strips)
{
    return (size_t)strips * sizeof(strip);
}

static size_t member_bytes(const mt_group *g)
{
    return (size_t)(g->members + 1) * sizeof(member);
}

size_t mt_cuda_plan_bytes(const mt_group *g)
{
    return member_bytes(g) + (size_t)(g->members + 1) * sizeof(int64_t);
}

void mt_cuda_plan_place(plan *p, void *scratch)
{
    p->members = (member *)scratch;
    p->units = (int64_t *)((char *)scratch + member_bytes(&p->group));
}

/* at += what member [rows, cols] takes. */
static __device__ void add_member(int64_t at[ATS], const plan &p, int64_t rows, int64_t cols)
{
    at[AT_UNIT] += shift_up(rows, 7) * shift_up(cols, 7);
    at[AT_COLUMN] += cols;
    at[AT_SUMS] += shift_up(rows, 7) * cols;
#pragma unroll
    for (int i = 0; i < SIDES; i++) {
        if (!p.sides[i].present) continue;
        shape s = shape_of(p.sides[i], rows, cols);
        at[AT_CODES + i] += s.code_bytes;
        at[AT_SCALES + i] += s.scale_count;
    }
}

/* So many strips a block, up to so many blocks: stores of more would queue. */
enum { PLANNERS = 256, PLANNED_STRIPS = 32, MOST_PLANS = 32 };

/* Exclusive sums over the threads of the block. */
static __device__ __forceinline__ void scan(int64_t at[ATS])
{
    __shared__ int64_t totals[PLANNERS / 32][ATS];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
#pragma unroll
    for (int f = 0; f < ATS; f++) {
        int64_t sum = at[f];
        for (int step = 1; step < 32; step *= 2) {
            int64_t below = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += below;
        }
        if (lane == 31) totals[warp][f] = sum;
        at[f] = sum - at[f];
    }
    __syncthreads();
    for (int w = 0; w < warp; w++)
#pragma unroll
        for (int f = 0; f < ATS; f++) at[f] += totals[w][f];
}

/* Strips of a member. */
static __device__ __forceinline__ int strips_of(const member &m, int rows)
{
    return m.cols ? (int)((m.rows + rows - 1) / rows) : 0;
}

/* All strips, by as many blocks as there are; the block's threads have `each` members. */
static __device__ __forceinline__ void write_strips(const plan &p, const strip_table &t, int count,
                                                    int64_t each)
{
    __shared__ int first[PLANNERS], warps[PLANNERS / 32];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int sum = count, total = 0, before = 0;
    for (int step = 1; step < 32; step *= 2) {
        int below = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += below;
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads(); /* members are there, too */
    for (int w = 0; w < PLANNERS / 32; w++) {
        if (w == warp) before = total;
        total += warps[w];
    }
    first[threadIdx.x] = before + sum - count;
    __syncthreads();
    for (int64_t n = (int64_t)threadIdx.x * gridDim.x + blockIdx.x; n < t.most;
         n += (int64_t)gridDim.x * PLANNERS) {
        if (n >= total) {
            t.strips[n].rows = 0;
            continue;
        }
        int low = 0, at, of;
#pragma unroll
        for (int step = PLANNERS / 2; step; step /= 2)
            if (first[low + step] <= n) low += step;
        int64_t index = low * each;
        at = (int)n - first[low];
        while (at >= (of = strips_of(p.members[index], t.rows))) at -= of, index++;
        fill_strip(t.strips + n, p, t, p.members[index], (int)index, at);
    }
}

/* Each thread has consecutive members; each block makes them all, the same, and some strips. */
static __device__ __forceinline__ void make_plan(const plan &p, const strip_table &t)
{
    int64_t count = p.group.members, each = mt_ceil_div(count, PLANNERS);
    int64_t begin = threadIdx.x * each, end = begin + each < count ? begin + each : count;
    int64_t at[ATS] = {};
    for (int64_t i = threadIdx.x; i < p.zero_count; i += PLANNERS) p.zeros[i] = 0;
    for (int64_t i = begin; i < end; i++)
        add_member(at, p, mt_group_rows(&p.group, i), mt_group_cols(&p.group, i));
    scan(at);
    int strips = 0;
    for (int64_t i = begin; i < end; i++) {
        member m = { mt_group_rows(&p.group, i), mt_group_cols(&p.group, i),
                     mt_group_offset(&p.group, i) };
#pragma unroll
        for (int f = 0; f < ATS; f++) m.at[f] = at[f];
        p.members[i] = m;
        if (t.strips) strips += strips_of(m, t.rows);
        p.units[i] = m.at[AT_UNIT];
        add_member(at, p, m.rows, m.cols);
    }
    if (threadIdx.x == PLANNERS - 1) { /* no member follows its own: the totals */
        member m = {};
#pragma unroll
        for (int f = 0; f < ATS; f++) m.at[f] = at[f];
        p.members[count] = m;
        p.units[count] = m.at[AT_UNIT];
    }
    if (t.strips) write_strips(p, t, strips, each);
}

static __global__ void __launch_bounds__(PLANNERS) plan_kernel(const __grid_constant__ plan p)
{
    const strip_table none = {};
    let_follow();
    make_plan(p, none);
}

/* Results of members begin as of those without rows. */
static __global__ void __launch_bounds__(PLANNERS) job_kernel(const __grid_constant__ job j)
{
    let_follow();
    make_plan(j.p, j.table);
    if (!j.gives || blockIdx.x) return;
    for (int64_t i = threadIdx.x; i < j.p.group.members; i += PLANNERS) {
        const float none[MT_DIR_COUNT] = {};
        give_member(j, i, none, 0);
    }
}

mt_status mt_cuda_plan_members(mt_stream *stream, const plan *p)
{
    plan_kernel<<<1, PLANNERS, 0, mt_cuda_stream(stream)>>>(*p);
    MT_LAUNCHED(stream, "quantize: members");
    return MT_OK;
}

mt_status mt_cuda_plan_job(mt_stream *stream, const job *j)
{
    const int64_t parts = j->table.strips ? mt_ceil_div(j->table.most, PLANNED_STRIPS) : 1;
    const int64_t blocks = parts < 1 ? 1 : parts < MOST_PLANS ? parts : (int64_t)MOST_PLANS;
    job_kernel<<<(unsigned)blocks, PLANNERS, 0, mt_cuda_stream(stream)>>>(*j);
    MT_LAUNCHED(stream, "quantize: members");
    return MT_OK;
}
