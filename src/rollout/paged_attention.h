// Attention of one generation pass over keys and values in pages: decode and chunked prefill mixed, grouped
// heads.
//
//   o[t, n] = sum_j p_j v_j,  p = softmax_j(q[t, n] . k_j / sqrt(H)),  j = 0 ... position of t, same sequence
//
// Scores, softmax and sums are in the accumulator type (fp32 for fp32 and bf16, fp64 for fp64), and o is
// rounded once; where bf16 is computed by AMX tiles, p is rounded to bf16 before it meets v, as in training. Keys of a sequence are visited in ascending order, a page at a time, with a running maximum
// and sum (online softmax), so a token's result does not depend on what else is in the pass, on chunk borders
// or on thread count. On the CPU, pages that several sequences hold are read once for all of them: their
// queries go through the page together and part where their tables part, each taking its running state along
// (no merge is needed).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "models/model.h"
#include "rollout/kv_storage.h"
#include "rollout/paged_attention_task.h"

namespace bough {

// Tokens at positions begin ... begin + count - 1 of one sequence, whose pages are `pages` (room for all of
// them). Keys and values of the positions before `begin` are stored already.
struct Segment {
  std::span<const int32_t> pages;
  int64_t begin = 0;
  int64_t count = 0;
};

// Rows, and the runs that they take together: what a thread does at once. Not a concept of callers.
struct AttentionTask {
  int32_t row_begin = 0, row_end = 0;
  int32_t run_begin = 0, run_end = 0;  // their rows count from row_begin
  bool decodes = false;                // a row a sequence, else a part of one sequence
};
struct AttentionSchedule {
  std::vector<AttentionRow> rows;
  std::vector<AttentionRun> runs;
  std::vector<AttentionTask> tasks;
};
// At most `max_rows` decode rows a task: a task's rows share reads, but only tasks run in parallel.
AttentionSchedule schedule_attention(std::span<const Segment> segments, int64_t max_rows);

enum class AttentionPath { kFastest, kReference };  // kReference: tensor ops, any device

class PagedAttention : public AttentionContext {
 public:
  // The pass's tokens are those of the segments, in order. Storage and page tables must outlive this object
  // and not change while a pass runs.
  PagedAttention(KvStorage& storage, std::vector<Segment> segments,
                 AttentionPath path = AttentionPath::kFastest);

  at::Tensor attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH) override;

 private:
  void check_shapes(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH) const;
  at::Tensor attend_cpu(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                        const at::Tensor& v_TGH);
  at::Tensor attend_reference(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                              const at::Tensor& v_TGH);

  KvStorage& storage_;
  std::vector<Segment> segments_;
  AttentionPath path_;
  int64_t num_tokens_ = 0;
  std::vector<int64_t> slots_;  // where each token's keys and values go: page * kPageTokens + place in it
  AttentionSchedule schedule_;  // empty until the CPU path needs it
};

}  // namespace bough
