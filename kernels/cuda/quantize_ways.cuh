/* The ways of quantize: whether each knows a call, and its sweep. */
#pragma once

#include "kernels/cuda/quantize.cuh"

struct job;

extern "C" {
/* quantize_measure.cu: of a plain source as it lies. */
mt_status mt_cuda_quantize_measure(mt_stream *stream, const struct job *j, unsigned blocks);
/* quantize_rows.cu: the sweep over codes. */
bool mt_cuda_rows_suffice(const struct job *j);
mt_status mt_cuda_quantize_rows(mt_stream *stream, const struct job *j, unsigned blocks);
/* quantize_short.cu: by itself or by those below; the kind of a call's directions, KINDS where it
 * does not know it. */
bool mt_cuda_short_suffices(const struct job *j);
mt_status mt_cuda_quantize_short(mt_stream *stream, const struct job *j);
int mt_cuda_short_kind(const struct job *j);
/* quantize_bytes.cu: of a kind; whether members' results, found before, are given by it, too; the
 * rows of its strips, which the plan is to write, and the tiles that they have beside each other;
 * the sweep over codes. */
bool mt_cuda_bytes_suffice(const struct job *j);
bool mt_cuda_bytes_give(const struct job *j);
int mt_cuda_bytes_rows(const mt_stream *stream, const struct job *j);
int mt_cuda_bytes_wide(const mt_stream *stream, const struct job *j);
mt_status mt_cuda_quantize_bytes(mt_stream *stream, const struct job *j);
/* Shared memory of its blocks, at most, where elements are SwiGLU's and columns are made. */
int mt_cuda_swiglu_bytes(void);
/* quantize_values.cu: the same where a direction is kept decoded; not of amaxes. */
bool mt_cuda_values_suffice(const struct job *j);
mt_status mt_cuda_quantize_values(mt_stream *stream, const struct job *j);
/* The same of nvfp4: quantize_nvfp4.cu, and quantize_chosen.cu under 4over6. */
enum { MT_CUDA_NVFP4_ROWS = 3 * TILE };
bool mt_cuda_nvfp4_suffices(const struct job *j);
bool mt_cuda_chosen_suffices(const struct job *j);
mt_status mt_cuda_quantize_nvfp4(mt_stream *stream, const struct job *j);
mt_status mt_cuda_quantize_chosen(mt_stream *stream, const struct job *j);
/* quantize_masters.cu: f32 to E4M3, its sweep over codes; directions may be decoded. */
bool mt_cuda_masters_suffice(const struct job *j);
mt_status mt_cuda_quantize_masters(mt_stream *stream, const struct job *j);
/* quantize_rotated.cu: nvfp4, whose rows go by another way; may be measured by it. */
bool mt_cuda_rotated_suffices(const struct job *j);
mt_status mt_cuda_quantize_rotated(mt_stream *stream, const struct job *j);
/* quantize_strands.cu: inside that way, what needs no codes of columns. */
bool mt_cuda_strands_suffice(const struct job *j);
mt_status mt_cuda_quantize_strands(mt_stream *stream, const struct job *j);
/* quantize_kept.cu: rows of nvfp4 that are kept decoded. */
bool mt_cuda_kept_suffices(const struct job *j);
mt_status mt_cuda_quantize_kept(mt_stream *stream, const struct job *j);
/* quantize_warps.cu: may be measured by it. */
bool mt_cuda_warps_suffice(const struct job *j);
mt_status mt_cuda_quantize_warps(mt_stream *stream, const struct job *j);
/* quantize_gathered.cu: rows that are made on the way, where columns' codes are padded. */
bool mt_cuda_gathered_suffice(const struct job *j);
mt_status mt_cuda_quantize_gathered(mt_stream *stream, const struct job *j);
/* quantize_tokens.cu: rows alone of gathered ones, whose places among a token's slots are known. */
bool mt_cuda_tokens_suffice(const struct job *j, const struct mt_quantize_args *args);
mt_status mt_cuda_quantize_tokens(mt_stream *stream, const struct job *j,
                                  const struct mt_quantize_args *args);
/* quantize_master_nibbles.cu: E2M1 from f32, of tiles that are whole. */
bool mt_cuda_master_nibbles_suffice(const struct job *j, const struct mt_quantize_args *args);
mt_status mt_cuda_quantize_master_nibbles(mt_stream *stream, const struct job *j);
/* quantize_made.cu: members' amaxes of rows that are gathered or SwiGLU's; `found` holds
 * MT_CUDA_FOUND bytes for each of the tokens that rows are gathered from. */
enum { MT_CUDA_FOUND = sizeof(float2) };
mt_status mt_cuda_measure_made(mt_stream *stream, const struct job *j, int64_t tokens, void *found);
/* The weight of each row, from those of tokens' slots, `count` of them all. */
mt_status mt_cuda_weigh_rows(mt_stream *stream, float *row_weight, const float *weights,
                             const int32_t *position, int64_t count);
/* quantize_bias.cu: db (+)= the sums of members' columns, from the parts that tiles left. */
mt_status mt_cuda_quantize_bias(mt_stream *stream, const struct job *j, float *db, bool accumulate);
}
