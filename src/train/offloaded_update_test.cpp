#include "train/offloaded_update.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <deque>

namespace bough {
namespace {

// Copies that are done as late as allowed, which shows a buffer that is used too early.
class LateCopies final : public OrderedCopies {
 public:
  struct Counts {
    int64_t allocated = 0, bytes = 0, most_pending = 0;
  };
  explicit LateCopies(Counts& counts) : counts_(counts) {}

  at::Tensor allocate(int64_t bytes) override {
    counts_.allocated += bytes;
    return at::full({bytes}, 0xAB, at::kByte);
  }
  void enter() override { is_inside_ = true; }
  int64_t begin(const at::Tensor& to, const at::Tensor& from) override {
    EXPECT_TRUE(is_inside_);
    counts_.bytes += static_cast<int64_t>(from.nbytes());
    pending_.emplace_back(to, from);
    counts_.most_pending = std::max(counts_.most_pending, static_cast<int64_t>(pending_.size()));
    return num_begun_++;
  }
  void finish(int64_t number) override {
    for (; num_done_ <= number; ++num_done_) {
      pending_.front().first.copy_(pending_.front().second);
      pending_.pop_front();
    }
  }
  void leave() override {
    finish(num_begun_ - 1);
    is_inside_ = false;
  }

 private:
  Counts& counts_;
  std::deque<std::pair<at::Tensor, at::Tensor>> pending_;
  int64_t num_begun_ = 0, num_done_ = 0;
  bool is_inside_ = false;
};

AdamwState random_state(int64_t size, at::ScalarType type) {
  const at::ScalarType acc = type == at::kBFloat16 ? at::kFloat : type;
  const auto options = at::TensorOptions().dtype(acc);
  AdamwState state{.value = {},
                   .master = at::randn({size}, options),
                   .exp_avg = at::randn({size}, options),
                   .exp_avg_sq = at::rand({size}, options),
                   .gradient = at::randn({size}, options)};
  state.value = state.master.to(type, /*non_blocking=*/false, /*copy=*/true);
  if (type == acc) state.master = at::Tensor();
  return state;
}

AdamwState clone_of(const AdamwState& state) {
  const auto clone = [](const at::Tensor& x) { return x.defined() ? x.clone() : x; };
  return {clone(state.value), clone(state.master), clone(state.exp_avg), clone(state.exp_avg_sq),
          clone(state.gradient)};
}

TEST(OffloadedUpdate, HasTheBitsOfOneCallPerParameterForAnyPieces) {
  at::manual_seed(3);
  for (const auto type : {at::kBFloat16, at::kFloat, at::kDouble})
    for (const int64_t piece : {64, 128, 4096}) {
      LateCopies::Counts counts;
      OffloadedUpdate update(std::make_unique<LateCopies>(counts), piece);
      std::vector<OffloadedUpdate::Call> calls;
      int64_t expected_bytes = 0;
      for (const int64_t size : {1, 64, 0, 65, 1000, 127, 128}) {
        AdamwStep step{.lr = 0.01,
                       .beta1 = 0.9,
                       .beta2 = 0.95,
                       .eps = 1e-8,
                       .weight_decay = 0.1,
                       .gradient_scale = 0.5,
                       .step = 3};
        if (size == 1000) step.weight_decay = 0;
        calls.push_back({random_state(size, type), step});
        const AdamwState& state = calls.back().state;
        const auto of_value = static_cast<int64_t>(state.value.nbytes());
        expected_bytes +=
            static_cast<int64_t>(state.gradient.nbytes()) + (state.master.defined() ? 1 : 2) * of_value;
      }
      for (int round = 0; round < 3; ++round) {
        std::vector<AdamwState> expected;
        for (const auto& call : calls) {
          expected.push_back(clone_of(call.state));
          adamw(expected.back(), call.step);
        }
        update.run(calls);
        for (size_t i = 0; i < calls.size(); ++i) {
          const AdamwState& got = calls[i].state;
          EXPECT_TRUE(got.value.equal(expected[i].value)) << type << " piece " << piece << " parameter " << i;
          EXPECT_TRUE(got.exp_avg.equal(expected[i].exp_avg));
          EXPECT_TRUE(got.exp_avg_sq.equal(expected[i].exp_avg_sq));
          EXPECT_TRUE(!got.master.defined() || got.master.equal(expected[i].master));
        }
      }
      EXPECT_EQ(counts.bytes, 3 * expected_bytes) << "weights with a master are not fetched";
      EXPECT_EQ(counts.allocated, 4 * 8 * piece) << "two pairs of buffers, kept";
      EXPECT_GT(counts.most_pending, 1) << "the next gradient arrives while this one is used";
    }
}

}  // namespace
}  // namespace bough
