// Settings of `bough serve --train`, given as key=value.
#pragma once

#include <string>
#include <vector>

#include "base/settings.h"
#include "engine/settings.h"
#include "net/http_server.h"
#include "plan/plan_strategies.h"

namespace bough {

struct TrainingServiceSettings {
  std::string host = "127.0.0.1";
  int64_t port = 8000;
  std::string api_key_file;
  std::vector<std::string> served_model_name;
  std::string folder = "tinker";
  bool journal = true;
  std::string plan = "auto";
  int64_t max_tokens_per_pass = 0;
  Bytes memory, model_memory;
  double idle_seconds = 600;
  bool full_fine_tuning = false;
  int64_t max_rank = 256;
  int64_t max_sessions = 256;
  int64_t max_models = 8;
  int64_t max_requests = 4096;
  bool compress_requests = false;
  double heartbeat_seconds = 120;
  HttpLimits http = [] {
    HttpLimits limits;
    limits.max_body = {int64_t{256} << 20};
    limits.max_buffered = {int64_t{1} << 30};
    return limits;
  }();
  RolloutSettings rollout;

  template <class V>
  void visit(V& v) {
    v("host", host, "address to listen at; an address other than 127.0.0.1 or ::1 needs an API key",
      not_empty());
    v("port", port, "port to listen at; 0: a free port", range(0, 65535));
    v("api_key_file", api_key_file,
      "file of API keys, one a line as KEY or NAME KEY; every request must send one as X-API-Key; each NAME "
      "is "
      "a tenant, who sees only its own sessions and checkpoints; Tinker's SDK takes keys that begin with "
      "tml-; "
      "alternative: environment variable BOUGH_API_KEY");
    v("served_model_name", served_model_name,
      "names of the base model that clients may use; '*' in the list: any name; empty: the directory's name "
      "and its path");
    v("folder", folder, "folder for the clients' adapters and optimizer states", not_empty());
    v("journal", journal,
      "write every optimizer step and every waiting request to folder/.state, so that a service that was "
      "stopped or killed goes on there with its sessions when it starts again");
    v("plan", plan, "strategy of training plans (docs/plans.md), as tree_training_mode of a run",
      not_empty());
    v("max_tokens_per_pass", max_tokens_per_pass, "largest number of tokens of a training pass; 0: by device",
      range(0, 1'000'000'000));
    v("memory", memory,
      "bound of a training pass beyond weights and gradients; auto: 45% of what is free at the start");
    v("model_memory", model_memory,
      "memory of the models in training: adapters, gradients, optimizer states. Those that were used last "
      "stay "
      "in it, others wait in the folder, or on a GPU in host memory; auto: 22% of what is free at the start");
    v("idle_seconds", idle_seconds,
      "a model that is not used for so long leaves the memory until its next use", range(0.1, 1e9));
    v("full_fine_tuning", full_fine_tuning,
      "create_model trains a copy of all weights instead of an adapter, whatever its lora_config says; one "
      "model at a time");
    v("max_rank", max_rank, "largest rank of a client's adapter", range(1, 65'536));
    v("max_sessions", max_sessions, "most sessions of a tenant at once", range(1, 1'000'000));
    v("max_models", max_models, "most models of a tenant in training at once", range(1, 100'000));
    v("max_requests", max_requests,
      "most requests of a tenant that wait, run or have a result that was not fetched; more are answered 429",
      range(1, 1'000'000));
    v("compress_requests", compress_requests,
      "ask clients to send forward_backward compressed (zstd): for slow networks");
    v("heartbeat_seconds", heartbeat_seconds,
      "a session whose client sends no heartbeat for so long ends; its models leave the memory, saved ones "
      "stay",
      range(1.0, 1e9));
    v("http", http, "limits of connections and requests");
    v("rollout", rollout, "settings of the engines that sample");
  }
};

}  // namespace bough
