// Times how fast weights reach engine ranks, and how much a publication slows generation.
//
//   mpirun -n 2 build/bench/publication [layers, default 8] [apart]
//
// Rank 0 publishes a model's weights (134 M parameters in fp32 with 8 layers). Every other rank has an engine
// with one thread. apart: treats each rank as if it were on a separate host, so that all bytes are sent. The
// figures are medians of several repetitions, in this order in one run, so that ratios compare figures of the
// same run:
//
//   copy         the same bytes copied within rank 0's memory
//   checksum     one checksum of these bytes
//   broadcast    the same bytes in one broadcast of the communicator, without other computation
//   publication  from publish() until the last engine rank has checked the weights, engines idle
//   tokens/s     decoding rate of the engines, without a publication and with publications all the time
//   exchange     how long engines stop decoding to take arrived weights, compared with a decoding pass
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/median.h"
#include "rollout/copied_weights.h"
#include "rollout/embedded_engine.h"
#include "rollout/published_weights.h"
#include "run/engine_process.h"
#include "run/ranks_engine.h"

namespace {

using namespace bough;

constexpr int kRepeats = 7;
constexpr int64_t kSamples = 8, kTokens = 20'000;

ModelConfig config_of(int64_t layers) {
  ModelConfig config;
  config.vocab_size = 32'000;
  config.hidden_size = 1024;
  config.intermediate_size = 3072;
  config.num_layers = layers;
  config.num_heads = 16;
  config.num_kv_heads = 8;
  config.head_dim = 64;
  config.max_position_embeddings = 2 * kTokens;
  return config;
}

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return seconds_since(start);
}

double median_of(const std::function<double()>& once) {
  std::vector<double> seconds;
  once();
  for (int i = 0; i < kRepeats; ++i) seconds.push_back(once());
  return median(seconds);
}

// Median seconds of one broadcast of `bytes`, which has the size of the weights. Collective call.
double broadcast_seconds(std::vector<char>& bytes, Communicator& ranks) {
  return median_of([&] {
    ranks.barrier();
    return seconds_of([&] {
      ranks.run({.kind = Collective::Kind::kBroadcast, .receive = bytes.data(), .count = std::ssize(bytes)});
      ranks.barrier();
    });
  });
}

constexpr const char* kEngineCommand = "engine-process";  // a command of this program, started by generate()

std::unique_ptr<Model> make(int64_t layers) {
  auto model = make_model(config_of(layers), at::kFloat);
  initialise(*model, /*seed=*/1);
  return model;
}

void run_engine() {
  run_engine_process([](const Json& job, const ServeEngine& serve) {
    const auto model = make(job.at("layers").get<int64_t>());
    EmbeddedEngineOptions options;
    options.settings.kv_memory.count = int64_t{1} << 30;
    EmbeddedEngine engine(*model, options);
    serve(engine, *model, /*in_place=*/false, Changing::kTrained);
  });
}

void generate(int64_t layers, Communicator& requests, PublicationRanks& publication) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  EngineProcess engine({program, kEngineCommand}, {{"layers", layers}}, requests, publication);
  std::thread receiving([&] { engine.receive_weights(); });
  serve_engine(engine, requests);
  receiving.join();
}

void print_rate(const char* name, double bytes, double seconds, double copy) {
  std::printf("%-12s %7.3f s  %6.2f GB/s  %.2f of a copy's rate\n", name, seconds, bytes / seconds / 1e9,
              copy / seconds);
}

// Tokens per second, measured over some seconds, and the median seconds of a pass.
struct Decoding {
  double tokens_per_s = 0, pass_seconds = 0;
};
Decoding decode(RanksEngine& engine) {
  while (!engine.ready_for_weights()) engine.step();  // recomputes samples that the last weights interrupted
  const EngineStatistics before = engine.statistics();
  const auto start = std::chrono::steady_clock::now();
  std::vector<double> passes;
  while (seconds_since(start) < 6) {
    const int64_t steps = engine.statistics().steps;
    const double seconds = seconds_of([&] { engine.step(); });
    const int64_t made = engine.statistics().steps - steps;
    if (made > 0) passes.push_back(seconds / static_cast<double>(made));
  }
  const auto sampled = static_cast<double>((engine.statistics() - before).new_tokens);
  return {sampled / seconds_since(start), median(passes)};
}

void publish(Model& model, Communicator& requests, PublicationRanks& publication, double copy) {
  PublishedWeights weights(model, publication, /*waits=*/true);
  RanksEngine engine(nullptr, model.config(), requests);
  int32_t version = 0;
  double bytes = 0;
  std::vector<double> exchanges;
  const auto take = [&] {
    engine.update_weights(*weights.take());
    exchanges.push_back(engine.take_longest_exchange());
  };
  const double idle = median_of([&] {
    weights.publish(++version);
    take();
    const PublishedWeights::Report report = weights.take_report();
    bytes = report.bytes;
    return report.seconds;
  });
  print_rate("publication", bytes, idle, copy);

  GenerationRequest request;
  request.prompt_ids = {1, 2, 3};
  request.sampling = {.n_samples = kSamples, .max_new_tokens = kTokens, .ignore_eos = true};
  for (int64_t rank = 1; rank < requests.size(); ++rank) {
    request.prompt_ids[0] = static_cast<int32_t>(rank);
    request.id = static_cast<uint64_t>(rank);
    engine.submit(request);
  }
  for (int i = 0; i < 4; ++i) engine.step();
  exchanges.clear();
  std::vector<double> alone, beside, pass;
  double seconds = 0;
  int64_t publications = 0;
  for (int i = 0; i < 3; ++i) {
    const Decoding without = decode(engine);
    alone.push_back(without.tokens_per_s);
    pass.push_back(without.pass_seconds);
    std::atomic<bool> ends = false;
    std::thread trainer([&] {
      while (!ends.load()) weights.publish(++version);
    });
    beside.push_back(decode(engine).tokens_per_s);
    ends.store(true);
    trainer.join();
    const PublishedWeights::Report report = weights.take_report();
    seconds += report.seconds;
    publications += report.publications;
    take();
  }
  print_rate("beside", bytes, seconds / static_cast<double>(publications), copy);
  std::printf("tokens/s     %.1f alone, %.1f with continuous publication (%.0f%%)\n", median(alone),
              median(beside), 100 * median(beside) / median(alone));
  std::printf("exchange     %.2f ms, longest %.2f ms; a pass %.2f ms\n", 1e3 * median(exchanges),
              1e3 * std::ranges::max(exchanges), 1e3 * median(pass));
  for (int64_t rank = 1; rank < requests.size(); ++rank) engine.cancel(static_cast<uint64_t>(rank));
  engine.drain();
  engine.end();
  weights.end();
}

}  // namespace

int main(int argc, char** argv) {
  const at::NoGradGuard no_grad;
  at::set_num_threads(1);
  if (argc > 1 && argv[1] == std::string(kEngineCommand)) {
    run_engine();
    return 0;
  }
  if (!is_mpi_rank()) {
    std::fprintf(stderr, "start it with mpirun -n 2 (bench/publication.cpp says how)\n");
    return 2;
  }
  const std::unique_ptr<Communicator> ranks = mpi_communicator();
  const int64_t layers = argc > 1 ? std::atoll(argv[1]) : 8;
  std::unique_ptr<Model> model = make(layers);
  double copy = 0;
  {
    std::vector<char> bytes(static_cast<size_t>(num_flat_bytes(model->parameters())), 1);
    if (ranks->rank() == 0) {
      std::vector<char> other(bytes.size(), 2);
      copy = median_of(
          [&] { return seconds_of([&] { std::memcpy(other.data(), bytes.data(), bytes.size()); }); });
      print_rate("copy", static_cast<double>(bytes.size()), copy, copy);
      const at::Tensor whole = at::from_blob(bytes.data(), {std::ssize(bytes)}, at::kByte);
      uint64_t sum = 0;
      const double checksum = median_of([&] { return seconds_of([&] { sum += checksum_of(whole); }); });
      print_rate(sum == 0 ? "checksum 0" : "checksum", static_cast<double>(bytes.size()), checksum, copy);
    }
    const double broadcast = broadcast_seconds(bytes, *ranks);
    if (ranks->rank() == 0) print_rate("broadcast", static_cast<double>(bytes.size()), broadcast, copy);
  }
  const std::unique_ptr<Communicator> requests = ranks->split(0);
  const bool apart = argc > 2 && argv[2] == std::string("apart");
  PublicationRanks publication(ranks->split(0), apart ? str("host ", ranks->rank()) : host_identity());
  if (ranks->rank() == 0) {
    publish(*model, *requests, publication, copy);
  } else {
    model.reset();  // the engine's process has its own model
    generate(layers, *requests, publication);
  }
  return 0;
}
