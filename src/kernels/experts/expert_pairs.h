// Pairs of a token and an expert, sorted by expert, and the ops over their rows. Parts of experts.cpp.
// Letters as in experts.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace bough {

struct SortedPairs {
  at::Tensor pairs_P;    // int64: t · K + k of each sorted row
  at::Tensor places_TK;  // int64: the sorted row of each pair
  at::Tensor ends_E;     // int32: the rows of experts 0 to e
};

// A stable sort. experts: int64 [T, K]. On a CPU, throws InternalError if an index is out of range or twice
// in a row. On CUDA nothing waits for the device: pairs with an index out of range are the last rows, belong
// to no expert and have the place -1.
SortedPairs sort_pairs(const at::Tensor& experts_TK, int64_t num_experts);

struct ExpertRows {
  int64_t expert, begin, size;  // of the sorted rows
};
// Returns the rows of the experts that have rows, ascending. ends: on a CPU. Throws InternalError if there
// are more than ends[E - 1] rows.
std::vector<ExpertRows> rows_of_experts(const at::Tensor& ends_E, int64_t num_rows);

// a: [P, K], rows sorted by expert; weight: the experts one after another. is_transposed: weight is [E · O,
// K], and row p of the result [P, O] is a[p] · weight_eᵀ. Otherwise weight is [E · K, O], and it is a[p] ·
// weight_e. The CUDA kernel is for bf16 and does not wait for the device if groups_on_device() (experts.h).
at::Tensor grouped_product(const at::Tensor& a_PK, const at::Tensor& weight, const at::Tensor& ends_E,
                           bool is_transposed);

// rows: [P, D]; places: int64 [T, K]. Returns residual[t] + sum_k weights[t,k] · rows[places[t,k]], [T, D].
// Without weights they are 1. The CUDA kernel returns NaN for a place of -1.
at::Tensor add_weighted_rows(const at::Tensor& rows_PD, const at::Tensor& places_TK,
                             const std::optional<at::Tensor>& weights_TK,
                             const std::optional<at::Tensor>& residual_TD);

// a, d_a: [P, F]; d_gate_up: [P, 2F]; weights: [P], accumulator type. Returns d_weights[p] = d_a[p] · a[p];
// a and d_gate_up are multiplied by the row's weight.
at::Tensor weigh_rows_(const at::Tensor& a_PF, const at::Tensor& d_gate_up_PF2, const at::Tensor& d_a_PF,
                       const at::Tensor& weights_P);

}  // namespace bough
