// Placeholder until cost_model.cpp lands; remove it then.
#include "tree/cost_model.h"
namespace bough {
double CostModel::forward_seconds(const PassShape& p) const { return 1e-3 + p.tokens * 1e-5 + p.pairs * 1e-9; }
double CostModel::backward_seconds(const PassShape& p) const { return 2e-3 + p.tokens * 2e-5 + p.pairs * 2e-9; }
double CostModel::attention_forward_seconds(const PassShape& p) const { return p.pairs * 1e-9; }
double CostModel::head_forward_seconds(const PassShape& p) const { return p.head_rows * 1e-5; }
double CostModel::head_backward_seconds(const PassShape& p) const { return p.head_rows * 2e-5; }
int64_t CostModel::stack_row_bytes() const { return 1000; }
int64_t CostModel::activation_bytes() const { return 10000; }
int64_t CostModel::attention_bytes() const { return 1000; }
int64_t CostModel::exit_bytes() const { return 100; }
int64_t CostModel::temporary_bytes(const PassShape& p) const { return p.tokens * 2000; }
CostModel::CostModel(DeviceProfile d, ModelShape s) : device_(d), shape_(s) {}
}
