// `bough upcycle`: makes a mixture of experts of a dense model.
#include <filesystem>

#include "base/error.h"
#include "cli/command.h"
#include "cli/torch_options.h"
#include "models/checkpoint.h"
#include "models/upcycle.h"

namespace bough {

namespace {

struct UpcycleCommand {
  std::string model, out;
  UpcycleOptions upcycle;
  bool json = false;
};

void run_upcycle(const UpcycleCommand& options) {
  std::error_code absent;  // if OUT is missing, the two are not the same
  if (std::filesystem::equivalent(options.out, options.model, absent))
    throw UserError(str("OUT: ", quoted(options.out),
                        " is DIR itself, which would be overwritten; name another "
                        "folder"));
  if (!(options.upcycle.router_noise >= 0 && options.upcycle.router_noise <= 1))
    throw UserError(str("--router-noise: got ", options.upcycle.router_noise, ", expected 0 to 1"));
  const at::ScalarType stored = stored_type(options.model);
  const auto dense = load_model(options.model, stored == at::kDouble ? at::kDouble : at::kFloat);
  const auto mixture = upcycle(*dense, options.upcycle);
  save_model(options.out, *mixture, {.dtype = stored, .copy_from = options.model});
  const ModelConfig& config = mixture->config();
  if (options.json)
    print_json({{"model", options.out},
                {"experts", config.num_experts},
                {"experts_per_token", config.experts_per_token},
                {"expert_intermediate_size", config.expert_intermediate_size}});
  else
    print_table({{"model", options.out},
                 {"experts", str(config.num_experts, " of ", config.expert_intermediate_size, ", ",
                                 config.experts_per_token, " a token")},
                 {"next", str("bough sft --model ", options.out,
                              " ...: fewer than all experts a token need "
                              "training")}});
}

}  // namespace

void add_upcycle_command(CommandLine& line) {
  auto options = std::make_shared<UpcycleCommand>();
  Command command =
      line.add("upcycle", "Makes a mixture of experts (Mixtral) of a dense model (Llama, Mistral)",
               [options] { run_upcycle(*options); });
  command.add_option("DIR", options->model, "Hugging Face directory of the dense model")
      .required()
      .type_name("");
  command.add_option("OUT", options->out, "Folder to create").required().type_name("");
  command
      .add_option("--experts", options->upcycle.num_experts,
                  "Experts that each feed-forward layer is cut into")
      .range(1, 1024)
      .type_name("E");
  command.add_option("--experts-per-token", options->upcycle.experts_per_token, "Experts that a token uses")
      .range(1, 1024)
      .type_name("K");
  command
      .add_option(
          "--router-noise", options->upcycle.router_noise,
          "Standard deviation of the routers' weights; with 0 and K = E the mixture computes what DIR "
          "does")
      .type_name("X");
  command.add_option("--seed", options->upcycle.seed, "Seeds the routers' weights").type_name("N");
  add_json_flag(command, options->json);
}

}  // namespace bough
