// `bough bench serve`: the cost of the HTTP server in addition to that of its engine, in one process. Three
// modes take turns, with the same number of requests of random tokens, of the same lengths:
//
//   the engine alone, without a server;
//   unstreamed, each request on its own connection, all at once: tokens per second, against the engine's;
//   streamed: the time of each client's first token, against the time at which the engine alone samples a
//   request's first token, if all requests are submitted together.
//
// The clients are one thread that polls sockets, so that measuring takes little of the cores.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/format.h"
#include "base/median.h"
#include "base/random.h"
#include "cli/command.h"
#include "cli/generation_options.h"
#include "cli/served_model.h"
#include "cli/torch_options.h"
#include "rollout/embedded_engine.h"
#include "serve/server.h"

namespace bough {

namespace {

struct BenchServeOptions {
  std::string model;
  int64_t requests = 64, prompt_tokens = 32, max_new_tokens = 64, repeat = 3, seed = 1;
  EngineOptions engine;
  TorchOptions torch;
  bool json = false;
};

using Prompts = std::vector<std::vector<int32_t>>;

// Each run has other prompts, because cached prompts would cost nothing.
Prompts draw_prompts(const BenchServeOptions& options, int64_t vocabulary, int64_t run) {
  const CounterRandom random(static_cast<uint64_t>(options.seed + 1000 * run), Purpose::sample);
  Prompts prompts(static_cast<size_t>(options.requests));
  for (size_t i = 0; i < prompts.size(); ++i)
    for (int64_t t = 0; t < options.prompt_tokens; ++t)
      prompts[i].push_back(
          static_cast<int32_t>(random.below(static_cast<uint64_t>(vocabulary), i, static_cast<uint64_t>(t))));
  return prompts;
}

struct Measured {
  double seconds = 0;
  std::vector<double> first_token;  // seconds since all requests were sent, in order of arrival
  double tokens_per_second(const BenchServeOptions& options) const {
    return static_cast<double>(options.requests * options.max_new_tokens) / seconds;
  }
};

Measured generate_directly(Engine& engine, const BenchServeOptions& options, const Prompts& prompts) {
  Measured out;
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < prompts.size(); ++i) {
    GenerationRequest request{.id = i, .prompt_ids = prompts[i], .seed = static_cast<uint64_t>(options.seed)};
    request.sampling.max_new_tokens = options.max_new_tokens;
    request.sampling.ignore_eos = true;
    request.on_token = [&](const StreamedToken& token) {
      if (token.position == 0) out.first_token.push_back(seconds_since(start));
    };
    engine.submit(std::move(request));
  }
  while (!engine.idle()) engine.step();
  out.seconds = seconds_since(start);
  return out;
}

// A client sends one request and reads the answer to the end of the connection.
struct Client {
  int descriptor = -1;
  std::string unsent, answer;
  bool has_token = false, is_done = false;
};

// A stream's first event has only the prompt's token ids.
bool shows_token(const std::string& answer) {
  static constexpr std::string_view kIds = "\"token_ids\":[";
  for (size_t at = 0; (at = answer.find(kIds, at)) != std::string::npos;) {
    at += kIds.size();
    if (at < answer.size() && answer[at] != ']') return true;
  }
  return false;
}

Client connect_to(int port) {
  Client client;
  client.descriptor = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (client.descriptor < 0 ||
      connect(client.descriptor, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
    throw IoError(str("cannot connect to port ", port));
  fcntl(client.descriptor, F_SETFL, O_NONBLOCK);
  return client;
}

Measured run_clients(int port, const BenchServeOptions& options, const Prompts& prompts, bool streams) {
  std::vector<Client> clients;
  for (const auto& prompt : prompts) {
    Client& client = clients.emplace_back(connect_to(port));
    // Token ids come with every token, also if the bytes so far are not yet a valid text.
    const std::string body = dump_line({{"prompt", prompt},
                                        {"max_tokens", options.max_new_tokens},
                                        {"ignore_eos", true},
                                        {"return_token_ids", streams},
                                        {"stream", streams}});
    client.unsent = str("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n",
                        "Content-Length: ", body.size(), "\r\n\r\n", body);
  }
  Measured out;
  const auto start = std::chrono::steady_clock::now();
  size_t num_done = 0;
  std::vector<pollfd> watched(clients.size());
  std::vector<char> buffer(1 << 16);
  while (num_done < clients.size()) {
    for (size_t i = 0; i < clients.size(); ++i) {
      const Client& client = clients[i];
      watched[i] = {client.is_done ? -1 : client.descriptor,
                    static_cast<short>(POLLIN | (client.unsent.empty() ? 0 : POLLOUT)), 0};
    }
    poll(watched.data(), watched.size(), 1000);
    for (size_t i = 0; i < clients.size(); ++i) {
      Client& client = clients[i];
      if (watched[i].revents & POLLOUT) {
        const ssize_t sent =
            send(client.descriptor, client.unsent.data(), client.unsent.size(), MSG_NOSIGNAL);
        if (sent > 0) client.unsent.erase(0, static_cast<size_t>(sent));
      }
      if (!(watched[i].revents & (POLLIN | POLLHUP | POLLERR))) continue;
      const ssize_t count = recv(client.descriptor, buffer.data(), buffer.size(), 0);
      if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (count > 0) client.answer.append(buffer.data(), static_cast<size_t>(count));
      if (streams && !client.has_token && shows_token(client.answer)) {
        client.has_token = true;
        out.first_token.push_back(seconds_since(start));
      }
      if (count > 0) continue;
      client.is_done = true;
      ++num_done;
    }
  }
  out.seconds = seconds_since(start);
  for (const Client& client : clients) {
    close(client.descriptor);
    const bool is_whole =
        streams
            ? client.answer.find("data: [DONE]") != std::string::npos
            : client.answer.find(str("\"completion_tokens\":", options.max_new_tokens)) != std::string::npos;
    if (!client.answer.starts_with("HTTP/1.1 200") || !is_whole)
      throw IoError(str("the server's answer is not complete: ", quoted(client.answer, 200)));
  }
  return out;
}

Measured run_server(Engine& engine, const ServedModel& model, const BenchServeOptions& options,
                    const Prompts& prompts, bool streams) {
  Server server(engine, model, "");
  const std::string url = server.url();
  std::atomic<bool> is_done = false;
  Measured out;
  std::exception_ptr failure;
  std::thread clients([&] {
    try {
      out = run_clients(std::stoi(url.substr(url.rfind(':') + 1)), options, prompts, streams);
    } catch (...) {
      failure = std::current_exception();
    }
    is_done = true;
  });
  server.run([&] { return is_done.load(); });
  clients.join();
  if (failure) std::rethrow_exception(failure);
  return out;
}

void run_bench_serve(BenchServeOptions& options) {
  for (const auto& [name, value] : {std::pair{"--requests", options.requests},
                                    {"--prompt-tokens", options.prompt_tokens},
                                    {"--max-new-tokens", options.max_new_tokens},
                                    {"--repeat", options.repeat}})
    check_at_least(name, value, 1);
  check_at_least("--seed", options.seed, 0);
  ServeSettings settings;
  settings.port = 0;
  settings.log_requests = false;
  settings.max_requests = options.requests;
  settings.rollout = engine_settings(options.engine);
  settings.http.max_connections = options.requests + 16;
  const TorchSetup setup = set_up_torch(options.torch);
  ServedModel served = load_served_model(options.model, settings);
  const auto [model, matrices, engine] = load_engine(options.model, served.tokenizer, settings.rollout,
                                                     setup.dtype, setup.device, setup.precisions);
  raise_descriptor_limit(2 * settings.http.max_connections);
  std::vector<double> alone, unstreamed, ratios, first_alone, first_streamed, late;
  for (int64_t run = 0; run <= options.repeat; ++run) {
    const auto prompts = [&](int64_t part) {
      return draw_prompts(options, served.vocab_size, 3 * run + part);
    };
    const Measured by_engine = generate_directly(*engine, options, prompts(0));
    const Measured whole = run_server(*engine, served, options, prompts(1), /*streams=*/false);
    const Measured streamed = run_server(*engine, served, options, prompts(2), /*streams=*/true);
    if (run == 0) continue;  // the first run also warms up caches
    alone.push_back(by_engine.tokens_per_second(options));
    unstreamed.push_back(whole.tokens_per_second(options));
    ratios.push_back(unstreamed.back() / alone.back());
    first_alone.push_back(by_engine.first_token.back());
    first_streamed.push_back(streamed.first_token.back());
    // Compares the k-th earliest first token of the clients with the k-th earliest one of the engine alone.
    double latest = 0;
    for (size_t k = 0; k < streamed.first_token.size(); ++k)
      latest = std::max(latest, streamed.first_token[k] - by_engine.first_token[k]);
    late.push_back(latest);
  }
  if (options.json) {
    print_json({{"requests", options.requests},
                {"prompt_tokens", options.prompt_tokens},
                {"max_new_tokens", options.max_new_tokens},
                {"repeat", options.repeat},
                {"engine_tokens_per_s", median(alone)},
                {"served_tokens_per_s", median(unstreamed)},
                {"served_over_engine", median(ratios)},
                {"engine_last_first_token_seconds", median(first_alone)},
                {"served_last_first_token_seconds", median(first_streamed)},
                {"first_token_late_seconds", median(late)}});
    return;
  }
  const auto per_second = [](double rate) {
    return format_thousands(std::llround(rate)) + " tokens a second";
  };
  print_table({{"requests", str(format_thousands(options.requests), " at once, of ", options.prompt_tokens,
                                " + ", options.max_new_tokens, " tokens; median of ", options.repeat)},
               {"engine", per_second(median(alone))},
               {"served", str(per_second(median(unstreamed)), ": ",
                              format_significant(100 * median(ratios), 3), "% of the engine's")},
               {"first tokens", str("the last client's after ", format_duration(median(first_streamed)),
                                    ", with the engine alone after ", format_duration(median(first_alone)),
                                    "; at most ", format_duration(median(late)), " late")}});
}

}  // namespace

void add_bench_serve_command(CommandLine& line, Command& bench) {
  auto options = std::make_shared<BenchServeOptions>();
  Command command = line.add(bench, "serve", "Times the HTTP server, beside its engine alone",
                             [options] { run_bench_serve(*options); });
  command.add_option("--model", options->model, "Hugging Face directory").required().type_name("DIR");
  command.add_option("--requests", options->requests, "Concurrent requests, each over its own connection");
  command.add_option("--prompt-tokens", options->prompt_tokens, "Random tokens per prompt");
  command.add_option("--max-new-tokens", options->max_new_tokens, "Tokens per answer");
  add_engine_options(command, options->engine);
  command.add_option("--repeat", options->repeat, "Repetitions, after one that is not counted");
  command.add_option("--seed", options->seed, "Seed of the prompts and of sampling");
  add_torch_options(command, options->torch);
  add_json_flag(command, options->json);
}

}  // namespace bough
