// Serves a training run's groups to external agents over HTTP: a Server with an AgentSessions, behind the
// interface ExternalRollouts that the controller uses.
#pragma once

#include <string>

#include "control/external_rollouts.h"
#include "serve/server.h"

namespace bough {

class AgentServer final : public ExternalRollouts {
 public:
  // The server listens when the constructor returns. Throws like Server's constructor.
  AgentServer(Engine& engine, ServedModel model, std::string api_key, const AgentSessionsOptions& options)
      : server_(engine, std::move(model), std::move(api_key), options) {}

  std::string url() const { return server_.url(); }

  void start(ExternalRolloutSink& sink) override {
    server_.on_commands([&sink] { sink.wake(); });
    server_.agent_sessions().start(sink);
  }
  void offer(GroupTask task) override { server_.agent_sessions().offer(std::move(task)); }
  bool pass() override { return server_.pass(); }
  int64_t samples_in_flight() const override { return server_.num_running(); }
  void close() override {
    server_.agent_sessions().close();
    server_.close();
  }
  std::string waits_for() const override { return agent_sessions().waits_for(); }
  MetricValues metrics() const override {
    const AgentSessions::Counts counts = agent_sessions().counts();
    return {{"agents/sessions_open", static_cast<double>(counts.sessions_open)},
            {"agents/groups_open", static_cast<double>(counts.leased)},
            {"agents/sessions_started", static_cast<double>(counts.started)},
            {"agents/sessions_without_reward", static_cast<double>(counts.without_reward)},
            {"agents/leases_granted", static_cast<double>(counts.granted)},
            {"agents/leases_refused", static_cast<double>(counts.refused)},
            {"agents/leases_expired", static_cast<double>(counts.expired)},
            {"agents/requests_without_session", static_cast<double>(server_.num_untrained())}};
  }

 private:
  const AgentSessions& agent_sessions() const { return server_.agent_sessions(); }
  Server server_;
};

}  // namespace bough
