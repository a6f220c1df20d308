#include "train/run_checkpoint.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "models/checkpoint.h"
#include "train/small_model.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

constexpr OptimizerSettings kSettings{.lr = 0.01, .warmup_steps_proportion = 0};

// A run with synthetic gradients. Its state depends only on the step numbers.
struct SyntheticRun {
  explicit SyntheticRun(at::ScalarType type = at::kBFloat16, uint64_t seed = 0)
      : model(small_model(type, seed)), optimizer(*model, kSettings, 100) {}

  void train_to(int64_t step) {
    while (optimizer.num_steps() < step) {
      auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(optimizer.num_steps()));
      for (Parameter* parameter : model->parameters())
        parameter->main_grad.add_(
            at::randn(parameter->value.sizes(), generator, at::TensorOptions().dtype(at::kDouble)));
      optimizer.step();
    }
  }

  void save(const fs::path& run_dir, int64_t keep_last = 2) {
    const int64_t step = optimizer.num_steps();
    save_run_checkpoint(run_dir, step, *model, optimizer.snapshot(false), {{"seen", step * 10}},
                        {.keep_last = keep_last});
  }

  // Loads the latest checkpoint, trains to `step`, and compares with a run that never stopped.
  void expect_resumes(const fs::path& run_dir, int64_t step) {
    const auto checkpoint = find_latest_checkpoint(run_dir);
    ASSERT_TRUE(checkpoint);
    const Json state = load_run_checkpoint(*checkpoint, *model, optimizer);
    EXPECT_EQ(state, Json({{"seen", checkpoint->step * 10}}));
    EXPECT_EQ(optimizer.num_steps(), checkpoint->step);
    optimizer.check_integrity();
    train_to(step);
    SyntheticRun unbroken(model->dtype());
    unbroken.train_to(step);
    const auto expected = named_weights(*unbroken.model);
    const auto got = named_weights(*model);
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_TRUE(got[i].second.equal(expected[i].second)) << got[i].first;
  }

  std::unique_ptr<Model> model;
  Optimizer optimizer;
};

class RunCheckpointTest : public ::testing::Test {
 protected:
  RunCheckpointTest() : run_dir_(fs::path(::testing::TempDir()) / ("run_" + std::to_string(::getpid()))) {
    fs::remove_all(run_dir_);
    fs::create_directories(run_dir_);
  }
  ~RunCheckpointTest() override { fs::remove_all(run_dir_); }

  std::set<std::string> names(const fs::path& directory) const {
    std::set<std::string> result;
    for (const auto& entry : fs::directory_iterator(directory))
      result.insert(entry.path().filename().string());
    return result;
  }
  std::set<std::string> checkpoints() const { return names(run_dir_ / "checkpoints"); }

  void expect_error(const std::function<void()>& action, const std::vector<std::string>& words) {
    try {
      action();
      ADD_FAILURE() << "no error; expected one with " << words.front();
    } catch (const UserError& error) {
      for (const std::string& word : words)
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << word << " in: " << error.what();
    }
  }

  fs::path run_dir_;
};

TEST_F(RunCheckpointTest, ResumesBitForBit) {
  for (const auto type : {at::kBFloat16, at::kFloat, at::kDouble}) {
    SyntheticRun run(type);
    run.train_to(3);
    run.save(run_dir_);
    EXPECT_EQ(read_file(run_dir_ / "latest"), "step_3\n");
    SyntheticRun(type, 5).expect_resumes(run_dir_, 6);
  }
}

TEST_F(RunCheckpointTest, TheModelIsADirectoryOfItsOwnWithItsTokenizer) {
  const fs::path source = run_dir_ / "source";
  fs::create_directories(source);
  write_file_atomically(source / "tokenizer.json", "{\"a\": 1}");
  SyntheticRun run;
  save_run_checkpoint(run_dir_, 7, *run.model, run.optimizer.snapshot(false), {}, {.source_model = source});
  const auto checkpoint = find_latest_checkpoint(run_dir_);
  ASSERT_TRUE(checkpoint);
  EXPECT_EQ(names(checkpoint->model_directory()),
            (std::set<std::string>{"config.json", "model.safetensors", "tokenizer.json"}));
  EXPECT_EQ(names(checkpoint->directory),
            (std::set<std::string>{"model", "optimizer.safetensors", "state.json"}));
  EXPECT_EQ(read_file(checkpoint->model_directory() / "tokenizer.json"), "{\"a\": 1}");
  EXPECT_EQ(load_model(checkpoint->model_directory(), at::kBFloat16)->parameters().size(),
            run.model->parameters().size());
}

TEST_F(RunCheckpointTest, KeepsTheLastOnesAndDropsAFutureThatWasLeft) {
  EXPECT_FALSE(find_latest_checkpoint(run_dir_));
  SyntheticRun run;
  for (const int64_t step : {2, 9, 10, 11}) {  // 10 sorts before 9 as text
    run.train_to(step);
    run.save(run_dir_);
  }
  EXPECT_EQ(checkpoints(), (std::set<std::string>{"step_10", "step_11"}));
  write_file_atomically(run_dir_ / "latest", "step_10");  // the user goes back; no final line break
  EXPECT_EQ(find_latest_checkpoint(run_dir_)->step, 10);
  save_run_checkpoint(run_dir_, 10, *run.model, run.optimizer.snapshot(false), {},
                      {.keep_last = 1});  // replaces the existing step_10
  EXPECT_EQ(checkpoints(), (std::set<std::string>{"step_10"}));
  fs::remove(run_dir_ / "latest");
  EXPECT_EQ(find_latest_checkpoint(run_dir_)->step, 10);
}

TEST_F(RunCheckpointTest, RemovesTheFilesOfAKilledProcess) {
  SyntheticRun run;
  run.train_to(1);
  run.save(run_dir_);
  const fs::path folder = run_dir_ / "checkpoints";
  fs::create_directories(folder / ".step_5.tmp" / "model");
  fs::create_directories(folder / ".step_0.gone");
  write_file_atomically(run_dir_ / ".latest.123.0.tmp", "x");
  write_file_atomically(folder / "notes.txt", "the user's own");
  fs::rename(folder / "step_1", folder / ".step_1.old");  // killed while step 1 was written again
  clean_run_checkpoints(run_dir_);
  EXPECT_EQ(checkpoints(), (std::set<std::string>{"step_1", "notes.txt"}));
  fs::create_directories(folder / ".step_1.old");
  clean_run_checkpoints(run_dir_);
  EXPECT_EQ(checkpoints(), (std::set<std::string>{"step_1", "notes.txt"}));
  EXPECT_EQ(names(run_dir_), (std::set<std::string>{"checkpoints", "latest"}));
  SyntheticRun().expect_resumes(run_dir_, 3);
}

TEST_F(RunCheckpointTest, NamesTheDamagedFileAndOtherCheckpoints) {
  SyntheticRun run;
  run.train_to(1);
  run.save(run_dir_);
  run.train_to(2);
  run.save(run_dir_);
  const auto checkpoint = *find_latest_checkpoint(run_dir_);
  const auto load = [&] { load_run_checkpoint(checkpoint, *run.model, run.optimizer); };
  const auto damage = [&](const fs::path& name, const std::string& content,
                          const std::vector<std::string>& words) {
    const std::string before = read_file(checkpoint.directory / name);
    write_file_atomically(checkpoint.directory / name, content);
    expect_error(load, words);
    fs::remove(checkpoint.directory / name);
    expect_error(load, {"step_2", "step_1"});
    write_file_atomically(checkpoint.directory / name, before);
    load();
  };
  const std::string optimizer = read_file(checkpoint.directory / "optimizer.safetensors");
  const std::string weights = read_file(checkpoint.directory / "model/model.safetensors");
  damage("state.json", "{\"format\": 1, ", {"state.json", "step_2", "other checkpoints: step_1", "latest"});
  damage("state.json", R"({"format": 2, "step": 2, "state": {}})", {"state.json", "format 1"});
  damage("state.json", R"({"format": 1, "step": 1, "state": {}})", {"state.json", "step 2"});
  damage("optimizer.safetensors", optimizer.substr(0, optimizer.size() / 2), {"optimizer.safetensors"});
  damage("model/model.safetensors", weights.substr(0, weights.size() - 1), {"model.safetensors"});

  for (const std::string name : {"", "step_3", "step_02", "../../etc", "step_2/.."}) {
    write_file_atomically(run_dir_ / "latest", name);
    expect_error([&] { find_latest_checkpoint(run_dir_); }, {"latest", "step_1, step_2"});
  }
}

// A limit on the file size replaces a full disk: a write fails in the middle, as with ENOSPC.
TEST_F(RunCheckpointTest, AFailedWriteLeavesTheFormerCheckpoint) {
  SyntheticRun run;
  run.train_to(1);
  run.save(run_dir_);
  run.train_to(2);
  struct rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto ignored = ::signal(SIGXFSZ, SIG_IGN);
  for (const rlim_t bytes : {0, 1, 1000, 20'000}) {  // fail in config.json, weights, optimizer
    const struct rlimit limit { bytes, before.rlim_max };
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    std::string message;
    try {
      run.save(run_dir_);
    } catch (const IoError& error) {
      message = error.what();
    }
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
    EXPECT_NE(message.find("step 2 was not written"), std::string::npos) << bytes << " " << message;
    EXPECT_NE(message.find("step_1"), std::string::npos) << message;
    EXPECT_EQ(checkpoints(), std::set<std::string>{"step_1"});
    EXPECT_EQ(names(run_dir_), (std::set<std::string>{"checkpoints", "latest"}));
  }
  ::signal(SIGXFSZ, ignored);
  SyntheticRun().expect_resumes(run_dir_, 3);
  run.save(run_dir_);
  EXPECT_EQ(find_latest_checkpoint(run_dir_)->step, 2);
}

// The last write of a save, that of `latest`, fails. The new step's folder is complete by then and must be
// removed.
TEST_F(RunCheckpointTest, AFailedLatestTakesTheNewCheckpointBack) {
  SyntheticRun run;
  run.train_to(1);
  run.save(run_dir_);
  fs::remove(run_dir_ / "latest");
  fs::create_directories(run_dir_ / "latest");
  EXPECT_THROW(run.save(run_dir_), UserError);  // replaces step_1
  EXPECT_EQ(checkpoints(), std::set<std::string>{"step_1"});
  run.train_to(2);
  EXPECT_THROW(run.save(run_dir_), UserError);
  EXPECT_EQ(checkpoints(), std::set<std::string>{"step_1"});
  fs::remove(run_dir_ / "latest");
  SyntheticRun().expect_resumes(run_dir_, 3);
}

// Saves one step after another, without end. Each step is saved twice, as in a run that is interrupted right
// after a checkpoint and saves the step again.
[[noreturn]] void save_until_killed(const fs::path& run_dir) {
  try {
    clean_run_checkpoints(run_dir);
    SyntheticRun run;
    load_run_checkpoint(find_latest_checkpoint(run_dir).value(), *run.model, run.optimizer);
    while (true) {
      run.train_to(run.optimizer.num_steps() + 1);
      run.save(run_dir);
      run.save(run_dir, 1);
    }
  } catch (...) {
  }
  ::_exit(1);
}

TEST_F(RunCheckpointTest, KilledAtAnyMomentACompleteOneIsLatest) {
  using Clock = std::chrono::steady_clock;
  std::mt19937_64 random(1);
  const int num_threads = at::get_num_threads();
  at::set_num_threads(1);  // a forked child has no thread pool
  SyntheticRun run;
  run.train_to(1);
  const auto start = Clock::now();
  run.save(run_dir_);
  std::chrono::duration<double> longest_life = 3 * (Clock::now() - start);
  int64_t latest = 1;
  int num_hits = 0;
  // The test kills processes until some saves ended before the kill and some did not, for any speed of the
  // disk.
  for (int trial = 0; trial < 30 || (trial < 300 && (latest < 5 || num_hits < 5)); ++trial) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) save_until_killed(run_dir_);
    std::this_thread::sleep_for(longest_life * std::uniform_real_distribution<>()(random));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself";
    for (const std::string& name : checkpoints()) num_hits += name.starts_with(".");
    clean_run_checkpoints(run_dir_);
    const auto checkpoint = find_latest_checkpoint(run_dir_);
    ASSERT_TRUE(checkpoint);
    EXPECT_GE(checkpoint->step, latest);
    if (checkpoint->step == latest) longest_life *= 1.1;
    latest = checkpoint->step;
    SyntheticRun().expect_resumes(run_dir_, latest + 1);
    EXPECT_EQ(names(run_dir_), (std::set<std::string>{"checkpoints", "latest"}));
    for (const std::string& name : checkpoints()) {
      EXPECT_TRUE(name.starts_with("step_")) << name;
      EXPECT_EQ(names(run_dir_ / "checkpoints" / name),
                (std::set<std::string>{"model", "optimizer.safetensors", "state.json"}));
    }
  }
  at::set_num_threads(num_threads);
  EXPECT_GE(latest, 5);
  EXPECT_GE(num_hits, 5);
}

}  // namespace
}  // namespace bough
