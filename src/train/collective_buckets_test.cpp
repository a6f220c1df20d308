#include "train/collective_buckets.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "train/optimizer.h"

namespace bough {
namespace {

// Counts the collective calls that are begun.
class CountingCommunicator final : public Communicator {
 public:
  explicit CountingCommunicator(std::unique_ptr<Communicator> group) : group_(std::move(group)) {
    set_deadline(60);
  }
  int64_t rank() const override { return group_->rank(); }
  int64_t size() const override { return group_->size(); }
  std::unique_ptr<PendingCollective> begin(const Collective& collective) override {
    ++calls[collective.kind];
    return group_->begin(collective);
  }
  std::unique_ptr<Communicator> split(int64_t color) override { return group_->split(color); }

  std::map<Collective::Kind, int64_t> calls;

 private:
  const std::unique_ptr<Communicator> group_;
};

void on_counting_ranks(int64_t num_ranks, const std::function<void(CountingCommunicator&)>& work) {
  auto groups = thread_communicators(num_ranks);
  std::vector<std::thread> threads;
  for (auto& group : groups)
    threads.emplace_back([&] {
      CountingCommunicator counting(std::move(group));
      work(counting);
    });
  for (std::thread& thread : threads) thread.join();
}

// Tensors of 0 to 60 elements, and one of 200. `rank` seeds the values.
std::vector<at::Tensor> tensors_of(int64_t rank, at::ScalarType type) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(rank));
  std::vector<at::Tensor> tensors;
  for (const int64_t numel : {7, 0, 1, 60, 3, 200, 24, 13})
    tensors.push_back(at::randn({numel}, generator, at::TensorOptions().dtype(at::kDouble)).to(type));
  return tensors;
}

// The sum over ranks in the order of the communicator of threads, and in that of kFixedShares.
at::Tensor sum_over(int64_t num_ranks, size_t index, at::ScalarType type, bool fixed) {
  std::vector<at::Tensor> terms;
  for (int64_t rank = 0; rank < num_ranks; ++rank) terms.push_back(tensors_of(rank, type)[index]);
  if (!fixed) {
    at::Tensor sum = at::zeros_like(terms[0]);
    for (const at::Tensor& term : terms) sum = sum + term;
    return sum;
  }
  for (; terms.size() > 1; terms.resize(terms.size() / 2))
    for (size_t i = 0; i < terms.size() / 2; ++i) terms[i] = terms[2 * i] + terms[2 * i + 1];
  return terms[0];
}

TEST(CollectiveBuckets, HaveTheBitsOfACallPerTensorWhereverTheyEnd) {
  for (const auto type : {at::kFloat, at::kDouble})
    for (const int64_t num_ranks : {2, 3, 8})
      for (const bool fixed : {false, true}) {
        if (fixed && num_ranks == 3) continue;
        for (const int64_t bytes : {40, 500, 1 << 20})
          on_counting_ranks(num_ranks, [&](CountingCommunicator& ranks) {
            std::vector<at::Tensor> sums = tensors_of(ranks.rank(), type);
            if (!fixed) sum_in_buckets_(sums, ranks, bytes);
            std::vector<at::Tensor> own = tensors_of(ranks.rank(), type);
            reduce_scatter_(own, ranks, fixed, bytes);
            std::vector<at::Tensor> all;
            for (const at::Tensor& tensor : own) all.push_back(tensor.clone());
            all_gather_(all, ranks, fixed, bytes);
            for (size_t i = 0; i < own.size(); ++i) {
              const at::Tensor expected = sum_over(num_ranks, i, type, fixed);
              const ElementShare share = share_of(expected.numel(), &ranks, fixed);
              at::Tensor expected_own = at::zeros_like(expected);
              expected_own.narrow(0, share.begin, share.count)
                  .copy_(expected.narrow(0, share.begin, share.count));
              EXPECT_TRUE(own[i].equal(expected_own))
                  << i << " of " << bytes << " bytes, rank " << ranks.rank();
              EXPECT_TRUE(all[i].equal(expected)) << i << " of " << bytes << " bytes, rank " << ranks.rank();
              if (!fixed) {
                EXPECT_TRUE(sums[i].equal(expected)) << i << " of " << bytes << " bytes";
              }
            }
          });
      }
}

TEST(CollectiveBuckets, TakeACallPerBucketAndDtype) {
  on_counting_ranks(2, [](CountingCommunicator& ranks) {
    std::vector<at::Tensor> tensors(100);
    for (size_t i = 0; i < tensors.size(); ++i)
      tensors[i] = at::ones({10}, i % 2 == 0 ? at::kFloat : at::kBFloat16);
    all_gather_(tensors, ranks);
    EXPECT_EQ(ranks.calls[Collective::Kind::kAllGather], 2);
    ranks.calls.clear();
    all_gather_(tensors, ranks, false, 200);  // 50 tensors of 40 bytes, and 50 of 20 bytes
    EXPECT_EQ(ranks.calls[Collective::Kind::kAllGather], 10 + 5);
  });
}

// A model of many small parameters: bf16 with fp32 masters. Gradients are small integers, so sums over any
// number of ranks are exact.
struct SmallParameters {
  explicit SmallParameters(int64_t count) {
    auto generator = at::detail::createCPUGenerator(3);
    for (int64_t i = 0; i < count; ++i) {
      Parameter& parameter = *owned.emplace_back(std::make_unique<Parameter>());
      parameter.value =
          at::randn({1 + i % 50}, generator, at::TensorOptions().dtype(at::kDouble)).to(at::kBFloat16);
      parameter.parts = {{.name = str("p", i), .begin = 0, .end = parameter.value.size(0)}};
      parameters.push_back(&parameter);
    }
  }
  void set_gradients(int64_t rank, int64_t num_ranks) {
    auto generator = at::detail::createCPUGenerator(7);
    for (Parameter* parameter : parameters) {
      const at::Tensor whole = at::randint(-9, 10, parameter->value.sizes(), generator, at::TensorOptions());
      parameter->main_grad.copy_(rank == 0 ? whole - static_cast<double>(num_ranks - 1)
                                           : at::ones_like(whole));
    }
  }
  std::vector<std::unique_ptr<Parameter>> owned;
  std::vector<Parameter*> parameters;
};

TEST(CollectiveBuckets, AnOptimizerStepOfManySmallParametersTakesThreeCalls) {
  const OptimizerSettings settings{.lr = 0.1, .weight_decay = 0.1, .gradient_clipping = 0};
  SmallParameters alone(300);
  Optimizer expected(alone.parameters, settings, 10, {});
  for (int step = 0; step < 3; ++step) {
    alone.set_gradients(0, 1);
    expected.step();
  }
  for (const int64_t num_ranks : {2, 4}) {
    on_counting_ranks(num_ranks, [&](CountingCommunicator& ranks) {
      SmallParameters own(300);
      Optimizer optimizer(own.parameters, settings, 10, {.data = &ranks});
      for (int step = 0; step < 3; ++step) {
        ranks.calls.clear();
        own.set_gradients(ranks.rank(), num_ranks);
        optimizer.step();
        const std::map<Collective::Kind, int64_t> of_step = {
            {Collective::Kind::kReduceScatter, 1},  // gradients
            {Collective::Kind::kAllGather, 2}};     // squares of the norm, and weights
        EXPECT_EQ(ranks.calls, of_step);
      }
      optimizer.check_integrity();
      for (size_t i = 0; i < own.parameters.size(); ++i) {
        EXPECT_TRUE(own.parameters[i]->value.equal(alone.parameters[i]->value)) << i;
        EXPECT_EQ(own.parameters[i]->main_grad.count_nonzero().item<int64_t>(), 0) << i;
      }
    });
  }
}

}  // namespace
}  // namespace bough
