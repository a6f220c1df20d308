// Times the host's work in a decoding step, during which the GPU is idle.
//
//   OMP_NUM_THREADS=1 build/bench/decode_host
//
// Prints microseconds per step for the heads of an 8B model (32, in 8 groups): medians of 200 steps, without
// a model and without a GPU. The parts of a step:
//
//   plan       the samples and tokens to compute, and the pages for them (rollout/scheduler.h)
//   gather     tokens, positions and segments of the pass
//   attention  the work of each paged-attention block (kernels/paged_attention/paged_plan.h)
//   write      this work as the numbers that are sent to the device
//   commit     publication of full pages
//   draw       sampling requests, and storing their results
//
// The cases:
//   distinct   every sample has its own context of 2K to 8K tokens
//   groups     16 samples share each prompt of 2K to 8K tokens
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

#include "base/median.h"
#include "base/random.h"
#include "kernels/paged_attention/paged_plan.h"
#include "rollout/forward_pass.h"
#include "rollout/sampler.h"
#include "rollout/scheduler.h"

namespace {

using namespace bough;

constexpr int64_t kHeads = 32, kGroups = 8, kSteps = 200;
enum Part { kPlan, kGather, kAttention, kWrite, kCommit, kDraw, kNumParts };

class Host {
 public:
  Host(int64_t num_samples, int64_t group_size)
      : num_samples_(num_samples), scheduler_(num_samples, 1 << 20, 1 << 20) {
    std::mt19937 random(1);
    const int64_t num_requests = num_samples / group_size;
    for (int64_t r = 0; r < num_requests; ++r) {
      GenerationRequest request;
      request.id = static_cast<uint64_t>(r);
      const int64_t length = 2048 + (num_requests > 1 ? r * 6144 / (num_requests - 1) : 2048);
      for (int64_t i = 0; i < length; ++i)
        request.prompt_ids.push_back(static_cast<int32_t>(random() % 100'000));
      request.sampling.n_samples = group_size;
      scheduler_.add(std::move(request), {});
    }
  }

  void print(const char* name) {
    std::array<std::vector<double>, kNumParts> seconds;
    int64_t num_pages = 0;
    for (int64_t decoded = 0; decoded < kSteps;) {
      const auto times = step();
      if (num_decoding_ < num_samples_) continue;  // prompts are still being computed
      ++decoded;
      for (int part = 0; part < kNumParts; ++part) seconds[part].push_back(times[part]);
      num_pages = num_pages_;
    }
    double all = 0;
    std::printf("%-9s %4lld samples, %7lld pages:", name, static_cast<long long>(num_samples_),
                static_cast<long long>(num_pages));
    const char* names[] = {"plan", "gather", "attention", "write", "commit", "draw"};
    for (int part = 0; part < kNumParts; ++part) {
      const double of_part = median(seconds[part]) * 1e6;
      all += of_part;
      std::printf("  %s %.0f", names[part], of_part);
    }
    std::printf("  all %.0f\n", all);
  }

 private:
  std::array<double, kNumParts> step() {
    std::array<double, kNumParts> times = {};
    auto last = std::chrono::steady_clock::now();
    const auto lap = [&](Part part) {
      const auto now = std::chrono::steady_clock::now();
      times[part] += std::chrono::duration<double>(now - last).count();
      last = now;
    };
    Pass pass = scheduler_.plan();
    lap(kPlan);
    std::vector<int64_t> tokens, positions;
    std::vector<PagedSegment> segments;
    std::vector<uint8_t> is_sampled;
    for (const PassEntry& entry : pass.entries) {
      for (int64_t i = entry.begin; i < entry.begin + entry.count; ++i) {
        tokens.push_back(entry.tokens()[static_cast<size_t>(i)]);
        positions.push_back(i);
        is_sampled.push_back(entry.is_sampled(i));
      }
      segments.push_back({entry.table().pages, entry.begin, entry.count});
    }
    lap(kGather);
    const PagedWork work = plan_paged_work(segments, kHeads, kGroups);
    lap(kAttention);
    const PagedLayout layout = work.fits(capacities_) ? capacities_ : work.layout();
    numbers_.resize(std::max(numbers_.size(), static_cast<size_t>(layout.pages()) + work.pages.size()));
    work.write(numbers_.data(), layout);
    lap(kWrite);
    scheduler_.commit(pass);
    std::vector<std::pair<int32_t, int32_t>> copies;
    const auto started = scheduler_.start_fresh(copies);
    lap(kCommit);
    std::vector<ActiveSample*> samples = started;
    num_decoding_ = 0;
    for (const PassEntry& entry : pass.entries)
      if (entry.sample) {
        samples.push_back(entry.sample);
        ++num_decoding_;
      }
    std::vector<SamplingTask> requests;
    for (const ActiveSample* sample : samples) {
      const GenerationRequest& request = sample->request->request;
      SamplingTask& draw = requests.emplace_back();
      static_cast<SamplingOptions&>(draw) = request.sampling;
      draw.prompt = request.prompt_ids;
      draw.response = sample->result.token_ids;
      draw.uniform = CounterRandom(1, Purpose::sample).uniform(request.id, sample->tokens.size());
    }
    for (size_t i = 0; i < samples.size(); ++i) {
      const auto token = static_cast<int32_t>(requests[i].uniform * 100'000);
      samples[i]->tokens.push_back(token);
      samples[i]->result.token_ids.push_back(token);
      samples[i]->result.logprobs.push_back(0);
      samples[i]->result.raw_logprobs.push_back(0);
      samples[i]->result.sampling_logprobs.push_back(0);
      samples[i]->result.versions.push_back(0);
    }
    lap(kDraw);
    num_pages_ = static_cast<int64_t>(work.pages.size());
    return times;
  }

  int64_t num_samples_;
  Scheduler scheduler_;
  PagedLayout capacities_ = decode_capacities(rounded_decode_size(num_samples_), kGroups, true, true);
  std::vector<int32_t> numbers_;
  int64_t num_decoding_ = 0, num_pages_ = 0;
};

}  // namespace

int main() {
  for (const int64_t num_samples : {64, 256}) {
    Host(num_samples, 1).print("distinct");
    Host(num_samples, 16).print("groups");
  }
}
