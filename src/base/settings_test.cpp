#include "base/settings.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "base/error.h"
#include "base/random.h"

namespace bough {
namespace {

struct Optimizer {
  double lr = 1e-5;
  std::string schedule = "constant";
  std::optional<double> clip = 1.0;
  template <class V>
  void visit(V& v) {
    v("lr", lr, "peak learning rate", range(0.0, 10.0));
    v("schedule", schedule, "shape after warm-up", one_of({"constant", "cosine"}));
    v("clip", clip, "global norm", above(0.0));
  }
  void check() const {
    if (schedule == "cosine" && lr == 0) throw UserError("a cosine of lr 0 does nothing; set lr");
  }
};
struct Model {
  std::string path;
  template <class V>
  void visit(V& v) {
    v("path", path, "a model's folder");
  }
};
struct Root {
  int64_t seed = 1;
  bool deterministic = false;
  std::string mode = "dense";
  std::vector<std::string> stop;
  std::vector<int64_t> sizes = {1, 2};
  std::vector<double> ratios;
  std::optional<std::string> reward;
  std::optional<int64_t> limit;
  std::string fileroot = "runs";
  Bytes budget;
  Model model;
  Optimizer optimizer;
  template <class V>
  void visit(V& v) {
    v("seed", seed, "seeds all random numbers", at_least(0));
    v("deterministic", deterministic, "same bits on CUDA");
    v("tree_training_mode", mode, "how trees are computed",
      aliased({"dense", "packed", "path"}, {{"disabled", "dense"}, {"sparse", "packed"}, {"dta", "path"}}));
    v("stop", stop, "texts that end a completion", not_empty());
    v("sizes", sizes, "some sizes", range(0, 100));
    v("ratios", ratios, "some ratios");
    v("reward", reward, "file:function");
    v("limit", limit, "largest number; null: no limit");
    v("fileroot", fileroot, "folder of the runs");
    v("budget", budget, "memory", at_least(1024));
    v("model", model, "the model");
    v("optimizer", optimizer, "the optimizer");
  }
  static SettingAliases aliases() {
    return {{"actor.path", "model.path"}, {"cluster.fileroot", "fileroot"}, {"actor.opt", "optimizer"}};
  }
};

Root parse(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  return parse_settings<Root>(yaml, "run.yaml", overrides);
}

std::string error_of(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  try {
    parse(yaml, overrides);
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Settings, ReadsEveryType) {
  const Root root = parse(R"(
seed: 1e6
deterministic: true
tree_training_mode: path
stop: ["a b", 'null', c]
sizes: [3, 4]
ratios: [.5, 1, -2.5e-3]
reward: my_reward.py:score
limit: null
budget: 40GiB
model: { path: 08 }
optimizer:
  lr: +3e-4
  clip:
)");
  EXPECT_EQ(root.seed, 1000000);
  EXPECT_TRUE(root.deterministic);
  EXPECT_EQ(root.mode, "path");
  EXPECT_EQ(root.stop, (std::vector<std::string>{"a b", "null", "c"}));
  EXPECT_EQ(root.sizes, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(root.ratios, (std::vector<double>{0.5, 1, -2.5e-3}));
  EXPECT_EQ(root.reward, "my_reward.py:score");
  EXPECT_FALSE(root.limit);
  EXPECT_EQ(root.budget.count, int64_t{40} << 30);
  EXPECT_EQ(root.model.path, "08");
  EXPECT_EQ(root.optimizer.lr, 3e-4);
  EXPECT_FALSE(root.optimizer.clip);
}

TEST(Settings, NothingGivenMeansDefaults) {
  for (const char* yaml : {"", "# nothing\n", "---\n", "optimizer:\n", "{}"})
    EXPECT_TRUE(settings_diff(parse(yaml), Root{}).empty()) << yaml;
}

TEST(Settings, AliasesAreTheSameSetting) {
  const Root root =
      parse("actor: {path: m, opt: {lr: 0.5}}\ncluster: {fileroot: /x}\ntree_training_mode: dta\n");
  EXPECT_EQ(root.model.path, "m");
  EXPECT_EQ(root.optimizer.lr, 0.5);
  EXPECT_EQ(root.fileroot, "/x");
  EXPECT_EQ(root.mode, "path");
  EXPECT_EQ(parse("", {"actor.path=n", "actor.opt.lr=0.25"}).model.path, "n");
  EXPECT_EQ(
      error_of("actor:\n  path: m\nmodel:\n  path: n\n"),
      "run.yaml:4: 'model.path' is given twice, first at run.yaml:2 as 'actor.path'; remove one of them");
}

TEST(Settings, ErrorsNameKeyLineGotAndExpected) {
  struct Case {
    const char* yaml;
    const char* message;
  };
  const Case cases[] = {
      {"seed: 1\nsede: 2\n", "run.yaml:2: unknown setting 'sede'; did you mean 'seed'?"},
      {"optimizer:\n  lrr: 1\n", "run.yaml:2: unknown setting 'optimizer.lrr'; did you mean 'optimizer.lr'?"},
      {"lr: 1\n", "run.yaml:1: unknown setting 'lr'; did you mean 'optimizer.lr'?"},
      {"actor:\n  foo: 1\n", "run.yaml:2: unknown setting 'actor.foo'"},
      {"model:\n  xyzzyx: 1\n", "run.yaml:2: unknown setting 'model.xyzzyx'; known here: path"},
      {"seed: 1\n\nseed: 2\n", "run.yaml:3: 'seed' is given twice, first at run.yaml:1; remove one of them"},
      {"model: {path: a}\nmodel: {}\n",
       "run.yaml:2: 'model' is given twice, first at run.yaml:1; remove one of them"},
      {"seed: -1\n", "run.yaml:1: 'seed': got '-1', expected a whole number, at least 0"},
      {"seed: 1.5\n", "run.yaml:1: 'seed': got '1.5', expected a whole number, at least 0"},
      {"seed: '1'\n", "run.yaml:1: 'seed': got '1', expected a whole number, at least 0"},
      {"seed: 99999999999999999999\n",
       "run.yaml:1: 'seed': got '99999999999999999999', expected a whole number, at least 0"},
      {"seed:\nfileroot: x\n", "run.yaml:1: 'seed': got nothing, expected a whole number, at least 0"},
      {"seed: [1]\n", "run.yaml:1: 'seed': got a list of 1, expected a whole number, at least 0"},
      {"deterministic: yes\n", "run.yaml:1: 'deterministic': got 'yes', expected true or false"},
      {"optimizer: {lr: .nan}\n", "run.yaml:1: 'optimizer.lr': got '.nan', expected a number, 0 to 10"},
      {"optimizer: {lr: 1e999}\n", "run.yaml:1: 'optimizer.lr': got '1e999', expected a number, 0 to 10"},
      {"optimizer: {lr: 11}\n", "run.yaml:1: 'optimizer.lr': got '11', expected a number, 0 to 10"},
      {"optimizer: {clip: 0}\n",
       "run.yaml:1: 'optimizer.clip': got '0', expected a number, above 0, or null"},
      {"optimizer: 3\n", "run.yaml:1: 'optimizer': got '3', expected a group of settings"},
      {"optimizer: {schedule: linear}\n",
       "run.yaml:1: 'optimizer.schedule': got 'linear', expected one of constant | cosine"},
      {"sizes: [1, 2, x]\n",
       "run.yaml:1: 'sizes': got 'x' at position 2, expected a list, each a whole number, 0 to 100"},
      {"sizes: 3\n", "run.yaml:1: 'sizes': got '3', expected a list, each a whole number, 0 to 100"},
      {"stop: []\n", "run.yaml:1: 'stop': got a list of 0, expected a list, each a text, not empty"},
      {"budget: 40XB\n",
       "run.yaml:1: 'budget': got '40XB', expected bytes such as 123, 512MiB, 40GiB, or auto, at least 1024"},
      {"budget: 100\n",
       "run.yaml:1: 'budget': got '100', expected bytes such as 123, 512MiB, 40GiB, or auto, at least 1024"},
      {"- a\n", "run.yaml: got a list of 1, expected settings as 'key: value' lines"},
      {"seed: 1\n---\nseed: 2\n", "run.yaml: 2 YAML documents, expected one"},
      {"optimizer: {lr: 0, schedule: cosine}\n",
       "run.yaml: optimizer: a cosine of lr 0 does nothing; set lr"},
  };
  for (const Case& c : cases)
    EXPECT_EQ(error_of(c.yaml).substr(0, std::string(c.message).size()), c.message) << c.yaml;
  EXPECT_EQ(error_of("seed: 1\na: [1\nb: 2\n").substr(0, 11), "run.yaml:3:");
  // Any input gives a UserError, never another exception.
  for (const std::string& yaml : {std::string(2000, '['), std::string("\0\1\2", 3), std::string("a: *x"),
                                  std::string("? [1]\n: 2"), std::string("\xff\xfe seed")})
    EXPECT_NE(error_of(yaml), "no error");
}

TEST(Settings, OverridesWinAndTakeTextAsItStands) {
  const Root root = parse("seed: 3\noptimizer: {lr: 0.5, schedule: cosine}\n",
                          {"seed=4", "seed=5", "optimizer.lr=1e-3", "sizes=[7]", "fileroot=a: *b #c",
                           "model.path='x y'", "reward=", "optimizer={clip: 2}", "stop=['=', \"\\n\"]"});
  EXPECT_EQ(root.seed, 5);
  EXPECT_EQ(root.optimizer.lr, 1e-3);
  EXPECT_EQ(root.optimizer.schedule, "cosine");
  EXPECT_EQ(root.optimizer.clip, 2.0);
  EXPECT_EQ(root.sizes, (std::vector<int64_t>{7}));
  EXPECT_EQ(root.fileroot, "a: *b #c");
  EXPECT_EQ(root.model.path, "x y");
  EXPECT_EQ(root.stop, (std::vector<std::string>{"=", "\n"}));
  EXPECT_FALSE(root.reward);
  EXPECT_EQ(error_of("", {"seed"}),
            "command line: got 'seed', expected key=value, such as actor.eps_clip=0.2");
  EXPECT_EQ(error_of("", {"optimizer.lrr=1"}),
            "command line: unknown setting 'optimizer.lrr'; did you mean 'optimizer.lr'?");
  EXPECT_EQ(error_of("", {"seed=x"}), "command line: 'seed': got 'x', expected a whole number, at least 0");
  EXPECT_EQ(error_of("", {"sizes=[1"}).substr(0, 35), "command line: 'sizes': not valid YA");
}

// Settings that are printed and parsed again have the same bits of doubles and the same bytes of texts.
TEST(Settings, YamlRoundTripsExactly) {
  const CounterRandom random(7, Purpose::test);
  for (uint64_t i = 0; i < 300; ++i) {
    Root root;
    root.seed = static_cast<int64_t>(random.bits(i, 0) >> 1);
    root.optimizer.lr = random.uniform(i, 1) * std::pow(10.0, -static_cast<double>(random.below(300, i, 2)));
    for (uint64_t k = 0; k < 3; ++k)
      root.ratios.push_back(random.normal(i, 3 + k) * std::pow(10.0, static_cast<double>(i) - 150));
    std::string text;
    for (uint64_t k = 0; k < random.below(12, i, 10); ++k) {
      static const char* const kPieces[] = {":",      " ", "#",      "\n", "\"",   "'", "\\",   "é",
                                            "\u2028", "😀", "\x7f",   "\t", "0",    "-", "null", "a",
                                            "{",      "*", "\u0085", "%",  "\x01", "e1"};
      text += kPieces[random.below(std::size(kPieces), i, 20 + k)];
    }
    root.fileroot = text;
    root.reward = text;
    root.stop = {text + "x", "true"};
    root.budget.count =
        random.below(2, i, 40) ? static_cast<int64_t>(random.bits(i, 41) >> 8) + 1024 : int64_t{3} << 30;
    root.deterministic = i % 2 == 0;
    const std::string yaml = settings_yaml(root);
    const Root back = parse(yaml);
    const auto differences = settings_diff(root, back);
    ASSERT_TRUE(differences.empty()) << differences[0].key << ": " << differences[0].left << " became "
                                     << differences[0].right << "\n"
                                     << yaml;
    ASSERT_EQ(back.fileroot, text);
  }
}

TEST(Settings, PrintsShortNumbersThatYaml11ReadersTakeForNumbers) {
  Root root;
  const std::string yaml = settings_yaml(root);
  EXPECT_NE(yaml.find("\n  lr: 1.0e-05\n"), std::string::npos) << yaml;
  EXPECT_NE(yaml.find("\nbudget: auto\n"), std::string::npos) << yaml;
  EXPECT_NE(yaml.find("\nlimit: null\n"), std::string::npos) << yaml;
  // Characters that some YAML parsers refuse or change if they are not escaped.
  root.fileroot = "\x7f\u0085\u2028\ufeffé";
  EXPECT_NE(settings_yaml(root).find("fileroot: \"\\u007F\\u0085\\u2028\\uFEFFé\"\n"), std::string::npos);
}

TEST(Settings, DifferencesJsonRowsAndHelp) {
  Root left, right;
  right.optimizer.lr = 2e-5;
  right.sizes = {1};
  const auto differences = settings_diff(left, right);
  ASSERT_EQ(differences.size(), 2u);
  EXPECT_EQ(differences[0].key, "sizes");
  EXPECT_EQ(differences[0].left, "[1, 2]");
  EXPECT_EQ(differences[1].key, "optimizer.lr");
  EXPECT_EQ(differences[1].right, "2.0e-05");

  EXPECT_EQ(settings_json(right)["optimizer"]["lr"], 2e-5);
  EXPECT_EQ(settings_json(right)["limit"], nullptr);

  int changed = 0;
  for (const SettingRow& row : settings_rows(right)) changed += !row.is_default;
  EXPECT_EQ(changed, 2);

  const std::string help = settings_help<Root>();
  EXPECT_NE(help.find("optimizer.lr: 1.0e-05"), std::string::npos) << help;
  EXPECT_NE(help.find("peak learning rate (0 to 10)\n"), std::string::npos) << help;
  EXPECT_NE(help.find("(dense | packed | path; disabled = dense; sparse = packed; dta = path)"),
            std::string::npos);
}

// An entry of a list, with a short form.
struct Entry {
  std::string name;
  double weight = 1;

  template <class V>
  void visit(V& v) {
    v("name", name, "name of the entry");
    v("weight", weight, "its factor", range(-10, 10));
  }
  void check() const {
    if (name.empty()) throw UserError("name is missing");
  }
  static Entry from_text(const std::string& text) {
    if (text == "bad") throw UserError("got 'bad', expected a good name");
    return {.name = text};
  }
  std::optional<std::string> to_text() const { return weight == 1 ? std::optional(name) : std::nullopt; }
};

struct Listed {
  std::vector<Entry> entries;
  int64_t after = 0;

  template <class V>
  void visit(V& v) {
    v("entries", entries, "a list of groups");
    v("after", after, "something else");
  }
};

TEST(Settings, ListsOfGroups) {
  const auto shown = [](const std::string& yaml, const std::vector<std::string>& overrides = {}) {
    std::string out;
    for (const Entry& entry : parse_settings<Listed>(yaml, "run.yaml", overrides).entries)
      out += str(entry.name, "*", entry.weight, " ");
    return out;
  };
  EXPECT_EQ(shown(""), "");
  EXPECT_EQ(shown("entries: one"), "one*1 ");
  EXPECT_EQ(shown("entries: ''"), "");
  EXPECT_EQ(shown("entries: {name: one, weight: 2}"), "one*2 ");
  EXPECT_EQ(shown("entries:\n  - {name: one, weight: 2}\n  - two\n  - name: three\n"),
            "one*2 two*1 three*1 ");
  EXPECT_EQ(shown("entries: [one]", {"entries=two: 3", "after=1"}), "two: 3*1 ") << "a text as it stands";
  EXPECT_EQ(shown("", {"entries=[{name: 'x y', weight: 0.5}, z]"}), "x y*0.5 z*1 ");
  EXPECT_EQ(shown("entries: one", {"entries="}), "");
}

TEST(Settings, ListsOfGroupsPrintWhatParsesBack) {
  for (const std::vector<Entry>& entries :
       {std::vector<Entry>{}, {{"one"}}, {{"a: b", 2}}, {{"one"}, {"two", -0.1}, {"3"}}}) {
    const Listed listed{entries, 4};
    const auto back = parse_settings<Listed>(settings_yaml(listed), "run.yaml");
    EXPECT_TRUE(settings_diff(listed, back).empty()) << settings_yaml(listed);
    EXPECT_EQ(back.entries.size(), entries.size());
  }
  EXPECT_EQ(settings_yaml(Listed{{{"one"}}}), "entries: one\nafter: 0\n");
  EXPECT_EQ(settings_yaml(Listed{{{"a", 2}, {"b"}}}),
            "entries: [{name: a, weight: 2.0}, {name: b}]\nafter: 0\n");
  EXPECT_EQ(settings_diff(Listed{}, Listed{{{"a", 2}}})[0].right, "[{name: a, weight: 2.0}]");
  const std::string help = settings_help<Listed>();
  EXPECT_NE(help.find("entries[].weight: 1.0"), std::string::npos) << help;
  EXPECT_NE(help.find("its factor (-10 to 10)"), std::string::npos) << help;
}

TEST(Settings, ErrorsInListsOfGroupsNameTheElement) {
  const auto error = [](const std::string& yaml,
                        const std::vector<std::string>& overrides = {}) -> std::string {
    try {
      parse_settings<Listed>(yaml, "run.yaml", overrides);
    } catch (const UserError& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(error("entries:\n  - {name: a}\n  - {name: b, wieght: 2}\n"),
            "run.yaml:3: unknown setting 'entries[1].wieght'; did you mean 'weight'?");
  EXPECT_EQ(error("entries:\n  - name: a\n    weight: 11\n"),
            "run.yaml:3: 'entries[0].weight': got '11', expected a number, -10 to 10");
  EXPECT_EQ(error("entries:\n  - weight: 2\n"), "run.yaml:2: entries[0]: name is missing");
  EXPECT_EQ(error("after: 1\nentries: bad\n"), "run.yaml:2: 'entries': got 'bad', expected a good name");
  EXPECT_EQ(error("entries: [[a]]"),
            "run.yaml:1: 'entries': got an element that is a list of 1, expected a list of groups of "
            "settings such as "
            "[{name: ...}], or a text");
  EXPECT_NE(error("entries:").find("got nothing, expected a list of groups"), std::string::npos);
  EXPECT_EQ(
      error("", {"entries.weight=2"}),
      "command line: 'entries.weight': 'entries' is a list; give all of it, as entries='[{...}, {...}]'");
}

TEST(Settings, AMissingFileIsAUserError) {
  EXPECT_THROW(load_settings<Root>("/does/not/exist.yaml"), UserError);
  EXPECT_THROW(load_settings<Root>("/tmp"), UserError);
}

TEST(Bytes, ParsesUnitsAndPrintsBack) {
  EXPECT_EQ(Bytes::parse("123").count, 123);
  EXPECT_EQ(Bytes::parse("1.5 KiB").count, 1536);
  EXPECT_EQ(Bytes::parse("2GB").count, 2'000'000'000);
  EXPECT_TRUE(Bytes::parse("auto").is_auto());
  EXPECT_EQ(Bytes::parse("4611686018427387").to_string(), "4611686018427387");
  EXPECT_EQ(Bytes{int64_t{40} << 30}.to_string(), "40GiB");
  EXPECT_EQ(Bytes{0}.to_string(), "0");
  for (const char* bad : {"", "-1", "-1GiB", "GiB", "1 2", "1e3", "nan", "inf", "99999999999TiB", "40 Gib"})
    EXPECT_THROW(Bytes::parse(bad), UserError) << bad;
}

struct Completed {
  struct Part {
    int64_t size = 1;
    template <class V>
    void visit(V& v) {
      v("size", size, "");
    }
    void check() const {
      if (size > 5) throw UserError("too large");
    }
  } part;
  std::string both;
  template <class V>
  void visit(V& v) {
    v("part", part, "");
    v("both", both, "");
  }
  void complete() {
    if (!both.empty()) part.size = std::ssize(both);
  }
};

TEST(Settings, FieldsThatFollowFromOthersAreSetBeforeTheChecks) {
  EXPECT_EQ(parse_settings<Completed>("both: abc", "file").part.size, 3);
  EXPECT_EQ(parse_settings<Completed>("part: {size: 2}", "file").part.size, 2);
  EXPECT_THROW(parse_settings<Completed>("both: abcdef", "file"), UserError);
}

TEST(Settings, AFailedCheckNamesTheSourceOfItsValues) {
  const auto error = [](const std::string& yaml, const std::vector<std::string>& overrides) {
    try {
      parse_settings<Completed>(yaml, "job.yaml", overrides);
    } catch (const UserError& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(error("part: {size: 6}", {}), "job.yaml: part: too large");
  EXPECT_EQ(error("part: {size: 6}", {"both="}), "job.yaml: part: too large");
  EXPECT_EQ(error("part: {size: 2}", {"part.size=7"}), "command line: part: too large");
  EXPECT_EQ(error("part: {size: 2}", {"both=abcdefg"}), "command line: part: too large");
  EXPECT_EQ(error("part: {size: 6}", {"part.size=2"}), "no error");
}

}  // namespace
}  // namespace bough
