#include "env/environment_mcp.h"

#include <set>

#include "base/clock.h"
#include "env/env_test_util.h"

namespace bough {
namespace {

// An MCP server in plain Python, without the package `mcp`. Its arguments name its deviations from the
// protocol.
constexpr const char* kServer = R"PY(
import json, os, signal, subprocess, sys, threading, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
how = sys.argv[1:]
lock = threading.Lock()


def write(message):
    with lock:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def text(value, **more):
    return {"result": {"content": [{"type": "text", "text": str(value)}], **more}}


count = 0
wrote_late = False


def call(name, arguments):
    global count
    if name == "count":
        count += 1
        return text(count)
    if name == "add":
        return text(arguments["a"] + arguments["b"])
    if name == "wait":
        time.sleep(arguments["seconds"])
        return text("waited")
    if name == "until":
        while not os.path.exists(arguments["file"]):
            time.sleep(0.01)
        return text("late")
    if name == "after late":
        while not wrote_late:
            time.sleep(0.01)
        return text("after")
    if name == "fail":
        return text("it did not work", isError=True)
    if name == "picture":
        image = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
        inside = {"type": "resource", "resource": {"uri": "file:///x", "text": "inside"}}
        return {"result": {"content": [image, inside]}}
    if name == "structured":
        return {"result": {"content": [], "structuredContent": {"b": 1, "a": 2}}}
    if name == "hang":
        with lock:
            time.sleep(1000)
    if name == "die":
        os._exit(5)
    if name == "garbage":
        print("what?", flush=True)
        return text("")
    if name == "huge":
        return text("x" * 100_000_000)
    if name == "close":
        os.close(1)
        os.close(0)
        os._exit(0)
    return {"error": {"code": -32602, "message": f"Unknown tool: {name}"}}


if "spawn" in how:
    subprocess.Popen(["sleep", how[-1]], start_new_session=True, env={})
NAMES = ["add", "count", "wait", "fail", "picture", "structured", "hang", "die", "garbage", "huge", "close"]
answers = []
for line in sys.stdin:
    request = json.loads(line)
    method, params = request.get("method"), request.get("params", {})
    if method is None:
        answers.append(request)
        continue
    if "id" not in request:
        continue
    if method == "initialize":
        assert params["clientInfo"]["name"] == "bough", params
        version = "1999-01-01" if "old" in how else min(params["protocolVersion"], "2025-03-26")
        about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "s"}}
        reply = {"result": {"protocolVersion": version, **about}}
    elif method == "tools/list":
        if "cursor" not in params:  # what servers may ask of a client at any time
            write({"id": "p", "method": "ping"})
            write({"id": 77, "method": "sampling/createMessage", "params": {}})
            write({"method": "notifications/message", "params": {"data": "hello"}})
        at = int(params.get("cursor", 0))
        schema = {"type": "object", "properties": {}}
        names = NAMES[at:at + 5]
        tools = [{"name": name, "description": name + "!", "inputSchema": schema} for name in names]
        reply = {"result": {"tools": [] if "none" in how else tools}}
        if at + 5 < len(NAMES) and "none" not in how:
            reply["result"]["nextCursor"] = str(at + 5)
    elif method == "tools/call":
        if params["name"] == "answers":
            write({"id": request["id"], **text(json.dumps(answers))})
            continue
        def work(request=request, params=params):
            global wrote_late
            write({"id": request["id"], **call(params["name"], params["arguments"])})
            wrote_late = wrote_late or params["name"] == "until"
        threading.Thread(target=work, daemon=True).start()
        continue
    write({"id": request["id"], **reply})
)PY";

class McpEnvironmentTest : public EpisodeTest {
 protected:
  McpEnvironmentTest() {
    settings_.type = "mcp";
    settings_.workers = 3;
    set_server();
  }
  void set_server(const std::string& how = "") {
    settings_.command = "exec python3 '" + write("server.py", kServer) + "' " + how;
  }
  std::string answer(Environment& environment, const Action& action) {
    const EpisodeReply reply = take_turn(environment, action);
    EXPECT_EQ(reply.failure, EpisodeFailure::kNone) << reply.message;
    EXPECT_FALSE(reply.observation.done);
    return reply.observation.messages.at(0).at("content").get<std::string>();
  }
};

TEST_F(McpEnvironmentTest, TheModelGetsTheServersTools) {
  const auto environment = make_environment(settings_);
  const uint64_t episode = begin(*environment, problem(1));
  const Observation opened = wait().observation;
  ASSERT_EQ(opened.tools.size(), 11u) << "all pages";
  EXPECT_EQ(opened.tools[0].dump(), R"({"type":"function","function":{"name":"add","description":"add!",)"
                                    R"("parameters":{"type":"object","properties":{}}}})");
  EXPECT_TRUE(opened.messages.empty()) << "the problem's own";
  environment->step(episode, {.calls = {{"1", "wait", {{"seconds", 0.3}}},
                                        {"2", "add", {{"a", 1}, {"b", 2}}},
                                        {"3", "nothing", OrderedJson::object()}}});
  const Observation answered = wait().observation;
  EXPECT_EQ(answered.messages.dump(), R"([{"role":"tool","content":"waited"},{"role":"tool","content":"3"},)"
                                      R"({"role":"tool","content":"error: Unknown tool: nothing"}])")
      << "in the order of the calls, whichever is done first";
  EXPECT_EQ(answered.invalid_calls, 1);
  EXPECT_FALSE(answered.reward);
  environment->step(episode, says("the answer is 3"));
  EXPECT_TRUE(wait().observation.done);
}

TEST_F(McpEnvironmentTest, ToolsOfAProblemAreRefused) {
  const auto environment = make_environment(settings_);
  Problem problem{.id = "a", .prompt = "p", .messages = {}, .answer = ""};
  environment->check({{problem}, "d.jsonl"});
  problem.tools = OrderedJson::array();
  problem.where = "d.jsonl:1";
  try {
    environment->check({{problem}, "d.jsonl"});
    FAIL() << "no error";
  } catch (const UserError& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("d.jsonl:1: tools: ")) << error.what();
  }
}

TEST_F(McpEnvironmentTest, AnswersAreTextsForTheModel) {
  settings_.server = "worker";
  const auto environment = make_environment(settings_);
  EXPECT_EQ(answer(*environment, calls("fail")), "it did not work");
  EXPECT_EQ(answer(*environment, calls("picture")), "[image that is no text]\ninside");
  EXPECT_EQ(answer(*environment, calls("structured")), R"({"b":1,"a":2})");
  const std::string to_server = answer(*environment, calls("answers"));
  EXPECT_NE(to_server.find(R"({"jsonrpc": "2.0", "id": "p", "result": {}})"), std::string::npos) << to_server;
  EXPECT_NE(to_server.find("-32601"), std::string::npos) << to_server;
}

TEST_F(McpEnvironmentTest, ServersAreSharedAsTheSettingSays) {
  for (const auto& [server, counts] : {std::pair{"conversation", std::set<std::string>{"1"}},
                                       {"worker", {"1", "2", "3"}},
                                       {"run", {"1", "2", "3"}}}) {
    settings_.server = server;
    settings_.workers = server == std::string("worker") ? 1 : 3;
    const auto environment = make_environment(settings_);
    std::set<std::string> found;
    for (int i = 0; i < 3; ++i) found.insert(answer(*environment, calls("count")));
    EXPECT_EQ(found, counts) << server;
  }
  // Two conversations at the same time, with one shared server or one server each.
  for (const bool is_shared : {true, false}) {
    settings_.server = is_shared ? "run" : "worker";
    const auto environment = make_environment(settings_);
    const uint64_t first = begin(*environment, problem(1)), second = begin(*environment, problem(2));
    wait();
    wait();
    EXPECT_EQ(processes_with((folder_ / "server.py").string() + std::string(1, '\0')).size() > 1, !is_shared);
    environment->step(first, calls("wait", {{"seconds", 1}}));
    environment->step(second, calls("add", {{"a", 1}, {"b", 1}}));
    EXPECT_EQ(wait().episode, second) << "nobody waits for another's call";
    EXPECT_EQ(wait().episode, first);
  }
}

TEST_F(McpEnvironmentTest, AFailureEndsOnlyItsConversation) {
  settings_.timeout_seconds = 3;
  const std::string mark = str("7", getpid(), ".25");
  set_server("spawn " + mark);
  using enum EpisodeFailure;
  const struct {
    const char* tool;
    EpisodeFailure failure;
    const char* message;
  } kFaults[] = {{"hang", kTimeout, "no answer within 3 s"},
                 {"die", kCrash, "exited with status 5"},
                 {"garbage", kProtocol, "'what?', which is not a JSON-RPC message"},
                 {"huge", kProtocol, "without a line break"},
                 {"close", kCrash, "the worker"}};
  auto environment = make_environment(settings_);
  const uint64_t bystander = begin(*environment, problem(100));
  wait();
  for (const auto& [tool, failure, message] : kFaults) {
    const EpisodeReply reply = take_turn(*environment, calls(tool));
    EXPECT_STREQ(failure_name(reply.failure), failure_name(failure)) << tool << ": " << reply.message;
    EXPECT_NE(reply.message.find(message), std::string::npos) << tool << ": " << reply.message;
  }
  environment->step(bystander, calls("count"));
  EXPECT_EQ(wait().observation.messages[0]["content"], "1");
  EXPECT_FALSE(processes_with(mark).empty());
  environment.reset();
  expect_none_with(mark);
}

// A slow call is cancelled, and the server goes on. A server that sends nothing at all is killed and
// restarted.
TEST_F(McpEnvironmentTest, ASharedServerOutlivesASlowCall) {
  settings_.server = "run";
  settings_.timeout_seconds = 2;
  FakeClock clock;
  const auto environment =
      make_mcp_environment(settings_, {.clock = &clock, .longest_poll = std::chrono::milliseconds(1)});
  EXPECT_EQ(answer(*environment, calls("count")), "1");
  const uint64_t slow = begin(*environment, problem(1));
  wait();
  environment->step(slow, calls("until", {{"file", (folder_ / "go").string()}}));
  EXPECT_EQ(answer(*environment, calls("count")), "2");
  clock.advance(std::chrono::seconds(2));
  EXPECT_EQ(wait().failure, EpisodeFailure::kTimeout);
  environment->end(slow);
  write("go", "");
  EXPECT_EQ(answer(*environment, calls("after late")), "after") << "its late answer is dropped";
  EXPECT_EQ(answer(*environment, calls("count")), "3");
  const uint64_t hanging = begin(*environment, problem(1));
  wait();
  environment->step(hanging, calls("hang"));
  std::vector<EpisodeReply> replies;
  while (replies.empty()) {  // the clock may have been advanced before the call began
    clock.advance(std::chrono::seconds(2));
    replies = reply_queue_->take(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(replies[0].failure, EpisodeFailure::kTimeout);
  environment->end(hanging);
  EXPECT_EQ(answer(*environment, calls("count")), "1") << "another server";
  EXPECT_EQ(take_turn(*environment, calls("die")).failure, EpisodeFailure::kCrash);
  EXPECT_EQ(answer(*environment, calls("count")), "1");
}

// Tests a server that uses PyPI's package `mcp`. BOUGH_MCP_PYTHON names an interpreter that has this package,
// because the interpreter of the other tests does not.
TEST_F(McpEnvironmentTest, AServerOfTheOfficialPackage) {
  const char* const python = std::getenv("BOUGH_MCP_PYTHON");
  if (!python) GTEST_SKIP() << "BOUGH_MCP_PYTHON names no interpreter with mcp";
  const std::string file = write("official.py", R"PY(
from mcp.server import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers"""
    return a + b


@server.tool()
def fail(word: str) -> str:
    raise ValueError("no " + word)


server.run()
)PY");
  settings_.command = str("exec ", python, " ", file);
  for (const char* server : {"conversation", "run"}) {
    settings_.server = server;
    const auto environment = make_environment(settings_);
    const uint64_t episode = begin(*environment, problem(1));
    const OrderedJson tool = wait().observation.tools.at(0).at("function");
    EXPECT_EQ(tool["name"], "add");
    EXPECT_EQ(tool["description"], "Adds two numbers");
    EXPECT_EQ(tool["parameters"]["required"].dump(), R"(["a","b"])");
    environment->step(episode,
                      {.calls = {{"1", "add", {{"a", 20}, {"b", 22}}}, {"2", "fail", {{"word", "x"}}}}});
    const Observation answered = wait().observation;
    EXPECT_EQ(answered.messages[0]["content"], "42");
    EXPECT_EQ(answered.messages[1]["content"].get<std::string>().rfind("Error executing tool fail", 0), 0u);
    environment->step(episode, says("42"));
    EXPECT_TRUE(wait().observation.done);
  }
}

TEST_F(McpEnvironmentTest, UnusableEnvironmentsAreUserErrorsAtTheStart) {
  set_server("old");
  EXPECT_NE(error_of().find("speaks protocol version '1999-01-01', expected one of 2025-11-25, "),
            std::string::npos)
      << error_of();
  set_server("none");
  EXPECT_NE(error_of().find("the server has no tools"), std::string::npos) << error_of();
  settings_.command = "echo hello; sleep 100";
  EXPECT_NE(error_of().find("'hello', which is not a JSON-RPC message"), std::string::npos) << error_of();
  settings_.command = "/no/such/program";
  EXPECT_NE(error_of().find("exited with status 127"), std::string::npos) << error_of();
  settings_.command = "sleep 100";
  settings_.startup_timeout_seconds = 0.5;
  EXPECT_NE(error_of().find("not loaded within 0.5 s"), std::string::npos) << error_of();
  settings_.command = "";
  EXPECT_NE(error_of().find("environment.command is missing"), std::string::npos) << error_of();
}

}  // namespace
}  // namespace bough
