/* The Hopper GEMM on the host: tensor maps and the launch. */
#include "kernels/cuda/gemm_sm90_plan.cuh"

/* ---- tensor maps -------------------------------------------------------------------------------
 */

typedef CUresult (*map_encoder)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static mt_status find_encoder(map_encoder *encode)
{
    void *p = NULL;
    enum cudaDriverEntryPointQueryResult found;
    MT_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault,
                                             &found));
    MT_REQUIRE(p && found == cudaDriverEntryPointSuccess, MT_EDEVICE,
               "cuda: the driver has no cuTensorMapEncodeTiled (%d)", (int)found);
    *encode = (map_encoder)p;
    return MT_OK;
}

/* Ragged: row r of the segment of `n` rows that ends at row `end` is asked for as (2^30 - n + r,
 * 2^30, end) under strides w, 2^34 - w and w, whose sum is (end - n + r) w modulo 2^64; the bound
 * 2^30 of the first cuts at the segment's end. */
mt_status mt_cuda_gemm_sm90_map(CUtensorMap *map, const gemm_sm90_matrix *x)
{
    map_encoder encode = NULL;
    MT_TRY(find_encoder(&encode));
    enum { HUGE_EXTENT = 0x7fff0000 };
    size_t size = x->size;
    CUtensorMapDataType type = size == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                               : size == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                           : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    cuuint64_t w = (cuuint64_t)x->columns * size;
    cuuint64_t columns = (cuuint64_t)x->columns, rows = (cuuint64_t)x->rows;
    cuuint64_t plain[3] = { columns, rows, (cuuint64_t)x->members };
    cuuint64_t plain_strides[2] = { w, w * rows };
    cuuint64_t ragged[4] = { columns, SM90_MOST, HUGE_EXTENT, HUGE_EXTENT };
    cuuint64_t ragged_strides[3] = { w, (1ull << 34) - w, w };
    cuuint32_t box[4] = { (cuuint32_t)(128 / size), (cuuint32_t)x->box_rows, 1, 1 };
    cuuint32_t ones[4] = { 1, 1, 1, 1 };
    CUresult result = encode(map, type, rows ? 3 : 4, (void *)(uintptr_t)x->data,
                             rows ? plain : ragged, rows ? plain_strides : ragged_strides, box,
                             ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    MT_REQUIRE(result == CUDA_SUCCESS, MT_EDEVICE,
               "gemm: no tensor map of %s, %lld columns, %lld rows, %lld members: CUresult %d",
               x->name, (long long)x->columns, (long long)x->rows, (long long)x->members,
               (int)result);
    return MT_OK;
}

static mt_status make_maps(gemm_sm90_maps *maps, const gemm_problem *g,
                           const gemm_sm90_variant *variant)
{
    bool wgrad = g->layout == MT_GEMM_NT, along = g->layout == MT_GEMM_TN;
    int64_t members = g->rows.members;
    size_t size = g->fp8 ? 1 : sizeof(mt_bf16);
    gemm_sm90_matrix p = { "a",        g->b.data,
                           g->b.width, along ? g->cols : g->depth,
                           members,    along ? variant->tile / variant->cluster_n : 64,
                           size };
    gemm_sm90_matrix q = { "b", g->a.data, g->a.width, 0, members, variant->box_q, size };
    gemm_sm90_matrix d = {
        "d", g->d, g->d_width, wgrad ? g->height : 0, members, 64, gemm_sm90_result_size(g)
    };
    if (variant->by_rows) { /* P is X or dY */
        p = { "b", g->a.data, g->a.width, 0, members, variant->tile / variant->cluster_n, size };
        q = { "a", g->b.data, g->b.width, g->cols, members, variant->box_q, size };
    } else if (wgrad && g->fp8) { /* MT_LAYOUT_PADDED */
        int box_p = variant->tile / variant->cluster_n;
        p = { "b", g->a.data, MT_PADDED_PART, g->height, g->a.width / MT_PADDED_PART, box_p, size };
        q = { "a", g->b.data, MT_PADDED_PART, g->cols, g->b.width / MT_PADDED_PART, variant->box_q,
              size };
    } else if (wgrad) { /* P is dY, Q is X */
        p = q, p.box_rows = 64;
        q.name = "a", q.data = g->b.data, q.columns = g->b.width;
        q.box_rows = 64;
    }
    if (variant->turned) d.rows = g->cols, d.box_rows = g->d_real ? 32 : 64;
    gemm_sm90_matrix c = d;
    c.name = "c", c.data = g->c ? g->c : g->d;
    MT_TRY(mt_cuda_gemm_sm90_map(&maps->p, &p));
    MT_TRY(mt_cuda_gemm_sm90_map(&maps->q, &q));
    MT_TRY(mt_cuda_gemm_sm90_map(&maps->d, &d));
    return mt_cuda_gemm_sm90_map(&maps->c, &c);
}

/* ---- the launch --------------------------------------------------------------------------------
 */

mt_status mt_cuda_gemm_sm90_launch(mt_stream *stream, const gemm_sm90_variant *variant,
                                   const gemm_sm90_maps *maps, const gemm_sm90_args *args)
{
    int cluster = variant->cluster_m * variant->cluster_n;
    const bool factors = mt_gemm_has_factor(&args->factor);
    gemm_sm90_args own = *args;
    if (factors) own.factors = (int)gemm_sm90_shared_bytes(variant, args->rows.members, false);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = (unsigned)cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(mt_cuda_multiprocessors(stream) / cluster * cluster));
    config.blockDim = dim3((unsigned)variant->threads);
    config.dynamicSmemBytes = gemm_sm90_shared_bytes(variant, args->rows.members, factors);
    config.stream = mt_cuda_stream(stream);
    config.attrs = &attribute;
    config.numAttrs = cluster > 1;
    void *parameters[] = { (void *)maps, &own };
    MT_CUDA(cudaFuncSetAttribute(variant->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 SM90_SHARED));
    MT_CUDA(cudaLaunchKernelExC(&config, variant->kernel, parameters));
    MT_LAUNCHED(stream, "gemm (sm90)");
    return MT_OK;
}

gemm_sm90_args mt_cuda_gemm_sm90_args(const gemm_problem *g, const mt_cuda_gemm_path *path)
{
    bool wgrad = g->layout == MT_GEMM_NT,
         by_rows = mt_cuda_gemm_sm90_variant(g, path->variant)->by_rows;
    gemm_sm90_args args = {};
    args.rows = g->rows;
    args.m = (int)(wgrad ? g->height : g->cols);
    args.n = wgrad || by_rows ? (int)g->cols : 0;
    args.k = (int)(wgrad ? g->a.width : g->depth);
    args.width = path->width, args.super = path->super, args.most = SM90_MOST;
    args.add = g->c != NULL, args.half = !g->d_real;
    args.bias = (const float *)g->bias, args.factor = g->factor;
    args.scales_p = wgrad || by_rows ? g->scales_a : g->scales_b;
    args.scales_q = wgrad || by_rows ? g->scales_b : g->scales_a;
    args.levels = g->levels;
    return args;
}

void mt_cuda_gemm_sm90_turn(gemm_problem *g)
{
    gemm_problem was = *g;
    g->a = was.b, g->b = was.a, g->cols = was.height, g->height = was.cols;
    g->scales_a = was.scales_b, g->scales_b = was.scales_a;
}

/* Members of so many rows. */
static mt_status multiply_members(mt_stream *stream, const gemm_problem *g,
                                  const mt_cuda_gemm_path *path, int least, int most)
{
    const gemm_sm90_variant *variant = mt_cuda_gemm_sm90_variant(g, path->variant);
    gemm_problem of = *g;
    gemm_sm90_maps maps;
    if (variant->turned) mt_cuda_gemm_sm90_turn(&of);
    MT_TRY(make_maps(&maps, &of, variant));
    gemm_sm90_args args = mt_cuda_gemm_sm90_args(&of, path);
    args.least = least, args.most = most;
    return mt_cuda_gemm_sm90_launch(stream, variant, &maps, &args);
}

mt_status mt_cuda_gemm_sm90(mt_stream *stream, const gemm_problem *g, const mt_cuda_gemm_path *path)
{
    if (g->layout == MT_GEMM_NT || !mt_cuda_gemm_sm90_variant(g, path->variant)->leveled)
        return multiply_members(stream, g, path, 0, SM90_MOST);
    gemm_problem leveled = *g;
    leveled.a.data = g->leveled;
    MT_TRY(multiply_members(stream, &leveled, path, 0, MT_GEMM_FP8_LEVELED));
    const mt_cuda_gemm_path rest = mt_cuda_gemm_sm90_plan_rest(g);
    return multiply_members(stream, g, &rest, MT_GEMM_FP8_LEVELED + 1, SM90_MOST);
}
