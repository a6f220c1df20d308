#include "train/plan_execution.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "base/error.h"
#include "kernels/common/host_to_device.h"
#include "models/tensor_parallel.h"
#include "plan/pipeline_schedule.h"
#include "train/pass_input.h"
#include "train/stage_links.h"

namespace bough {

namespace {

// Number of rows (tokens) of the prefix KV stack that the plan execution needs. With context parallelism each
// pass also stores the rows of its tokens there while it runs.
int64_t stack_capacity(const PlannedTree& planned, const Communicator* context_ranks) {
  int64_t rows = planned.stack_capacity;
  if (context_ranks)
    for (const Block& block : planned.blocks) rows = std::max(rows, block.stack_rows + block.num_tokens);
  return rows;
}

// The head rows of a pass that context-parallel rank `rank` computes. The ranks' numbers of head rows differ
// by at most one.
BlockRows rows_of_rank(const BlockRows& rows, int64_t rank, int64_t size) {
  const int64_t begin = rank * rows.num_rows() / size, end = (rank + 1) * rows.num_rows() / size;
  BlockRows own;
  own.outside = rows.outside;
  own.sources.assign(rows.sources.begin() + begin, rows.sources.begin() + end);
  own.labels.assign(rows.labels.begin() + begin, rows.labels.begin() + end);
  const int64_t first = rows.loss_begin[static_cast<size_t>(begin)],
                last = rows.loss_begin[static_cast<size_t>(end)];
  own.loss_rows.assign(rows.loss_rows.begin() + first, rows.loss_rows.begin() + last);
  for (int64_t r = begin; r <= end; ++r)
    own.loss_begin.push_back(rows.loss_begin[static_cast<size_t>(r)] - first);
  return own;
}

// Executes a plan, or one pipeline stage's part of it. Each level has its own functions: run() takes the
// plan's steps in order, forward_block() and backward_block() take one block, run_pass() calls the model.
class PlanExecution {
 public:
  PlanExecution(Model& model, const ExecutorOptions& options, const Plan& plan, const TrainBatch& batch,
                std::vector<BlockHead*> heads, bool backward)
      : model_(model),
        options_(options),
        plan_(plan),
        batch_(batch),
        heads_(std::move(heads)),
        backward_(backward),
        ranks_(options.context_ranks && options.context_ranks->size() > 1 ? options.context_ranks : nullptr),
        pipeline_{
            .num_stages = model.stage().size, .backward = backward, .leaves_on_stack = ranks_ != nullptr},
        links_(model),
        stacks_(static_cast<size_t>(passes_under_way(pipeline_, model.stage().index))),
        trees_(plan.trees.size()) {
    if (!options.router_losses.is_used()) return;
    const auto type = at::TensorOptions(model.device()).dtype(accumulator_type(model.dtype()));
    const at::Tensor& shares_E = options.expert_shares_E;
    router_losses_ = {.coefficients = options.router_losses,
                      .scale = router_loss_scale(model.config(), batch),
                      .shares_E = shares_E.defined() ? shares_E.to(type) : shares_E,
                      .sums = &counts_.router_sums};
  }

  // TwoPhases, first phase: the stacks have no rows, but each pass refers to its stack until its backward.
  void run_forward_phase() {
    stacks_.resize(plan_.trees.size());
    for (const auto& place : leaves()) forward_block(place, /*runs_head=*/true);
  }
  void run_backward_phase(std::vector<BlockHead*> heads) {
    heads_ = std::move(heads);
    for (const auto& place : leaves()) {
      upload_rows(place);
      backward_block(place);
    }
  }

  BlockCounts run() {
    const std::vector<ExecutionStep> steps = execution_steps(plan_);
    const std::vector<ScheduleSlot> order = schedule_slots(steps, pipeline_, model_.stage().index);
    std::vector<int64_t> num_left(trees_.size());
    for (const ScheduleSlot& next : order) ++num_left[static_cast<size_t>(steps[next.step].tree)];
    for (const ScheduleSlot& next : order) {
      const ExecutionStep& step = steps[next.step];
      auto& tree = trees_[static_cast<size_t>(step.tree)];
      if (!tree) tree = make_tree(plan_.trees[static_cast<size_t>(step.tree)]);
      if (tree->rows.needed[step.block]) {
        BlockVisit place{*tree, step.block, tree->planned.blocks[step.block], stack_of(step, *tree),
                         tree->open[static_cast<size_t>(step.block)]};
        if (next.backward) backward_block(place);
        else forward_block(place);
      }
      if (--num_left[static_cast<size_t>(step.tree)] == 0) tree.reset();
    }
    links_.finish();
    return counts_;
  }

 private:
  // The state that a block keeps between its forward and its backward pass.
  struct Open {
    // The autograd graph of a leaf block. For an interior block: the graph of the first forward if
    // keeps_graph(block.keep), otherwise the graph of the recompute.
    std::unique_ptr<TreeContext> context;
    at::Tensor hidden_TD;   // this rank's tokens
    at::Tensor entered_TD;  // received from the previous stage
    std::shared_ptr<ContextPass> shared;
    std::vector<TreeAttentionOutput> attention_outputs;  // RecomputePolicy::kAttention: one per layer
    std::vector<BlockChooser::Lists> choices;            // of a forward without a graph, by layer
    std::vector<at::Tensor> experts;                     // the same: the experts that the tokens used
    at::Tensor boundary_rows_E;                          // int64: tokens of boundary_ED, by index in the pass
    at::Tensor boundary_ED;                              // boundary hidden states: other heads read them
    at::Tensor d_boundary_ED;                            // gradients of boundary_ED, accumulator type
  };
  struct Tree {
    Tree(const PlannedTree& of_plan, const TrainBatch& batch)
        : planned(of_plan), rows(make_row_map(of_plan, batch)), open(of_plan.blocks.size()) {}
    const PlannedTree& planned;
    RowMap rows;
    std::vector<Open> open;            // by block
    std::vector<int64_t> flat_counts;  // with losses of routers
  };
  struct StackSlot {
    int32_t tree = -1;  // index in the plan: the tree that the stack is assigned to
    std::unique_ptr<PrefixKvStack> rows;
  };
  // The block that is executed now, with its tree, prefix KV stack and state.
  struct BlockVisit {
    Tree& tree;
    const int32_t index;
    const Block& block;
    PrefixKvStack& stack;
    Open& open;
  };

  std::unique_ptr<Tree> make_tree(const PlannedTree& planned) const {
    auto tree = std::make_unique<Tree>(planned, batch_);
    if (router_losses_) tree->flat_counts = flat_counts(planned, batch_);
    return tree;
  }

  // The needed blocks of a plan of leaf blocks, each in a tree of its own. Allocates the trees.
  std::vector<BlockVisit> leaves() {
    std::vector<BlockVisit> visits;
    for (size_t t = 0; t < trees_.size(); ++t) {
      if (plan_.trees[t].blocks.empty()) continue;
      if (!trees_[t]) trees_[t] = make_tree(plan_.trees[t]);
      Tree& tree = *trees_[t];
      for (size_t b = 0; b < tree.planned.blocks.size(); ++b)
        if (tree.rows.needed[b])
          visits.push_back(
              {tree, static_cast<int32_t>(b), tree.planned.blocks[b],
               stack_of({.tree = static_cast<int32_t>(t), .chain = static_cast<int32_t>(t)}, tree),
               tree.open[b]});
    }
    return visits;
  }

  // The blocks at and below one root block are a chain (ExecutionStep::chain). Chain i uses prefix KV stack i
  // modulo the number of stacks. If the stack was last used for another tree, it is allocated again, with the
  // capacity that this tree needs.
  PrefixKvStack& stack_of(const ExecutionStep& step, const Tree& tree) {
    StackSlot& stack = stacks_[static_cast<size_t>(step.chain) % stacks_.size()];
    if (!stack.rows || (stack.tree != step.tree && stack.rows->num_rows() == 0)) {
      stack.rows.reset();
      stack.rows = std::make_unique<PrefixKvStack>(model_.config(), stack_capacity(tree.planned, ranks_),
                                                   model_.dtype(), model_.device(), backward_);
      stack.tree = step.tree;
    }
    return *stack.rows;
  }

  // runs_head: run the head after a forward that records a graph, too.
  void forward_block(const BlockVisit& place, bool runs_head = false) {
    const Block& block = place.block;
    Open& open = place.open;
    const bool with_graph = backward_ && (!block.interior || keeps_graph(block.keep));
    at::AutoGradMode mode(with_graph);
    if (block.interior) place.stack.push(block.ranges[0].begin, block.ranges[0].end);
    auto pass = make_pass(place, false, /*reads_rows=*/!backward_ || !block.interior);
    if (backward_ && block.interior && block.keep == RecomputePolicy::kAttention)
      pass.keep_outputs = &open.attention_outputs;
    if (pass.shared && !block.interior && stacks_.size() > 1) pass.shared->keep_rows();
    auto context = std::make_unique<TreeContext>(std::move(pass));
    if (!model_.stage().is_first())
      open.entered_TD =
          links_.receive({input_.tokens_T.size(0), model_.config().hidden_size}, StageLinks::Way::kForward);
    const auto hidden_TD = run_pass(open, *context);
    if (options_.routed_experts) record_experts(place, context->experts().used_TLK());
    open.shared = input_.shared;
    if (model_.stage().is_last()) finish_forward(place, hidden_TD, runs_head || !backward_);
    else links_.send(hidden_TD.detach(), StageLinks::Way::kForward);
    if (with_graph) {
      open.context = std::move(context);
      open.hidden_TD = hidden_TD;
    } else if (backward_) {
      open.choices = context->take_choices();
      open.experts = context->experts().used();
    } else {
      open.entered_TD.reset();
      open.shared.reset();
    }
  }

  // Appends the experts of a block's tokens to the records of the sequences that contain them. A block runs
  // after the block above it, so a sequence's tokens come in order.
  void record_experts(const BlockVisit& place, const at::Tensor& used_TLK) {
    const PlannedTree& planned = place.tree.planned;
    const auto* used = static_cast<const int64_t*>(used_TLK.const_data_ptr());
    const int64_t size = used_TLK.size(1) * used_TLK.size(2);
    std::vector<int64_t> row_of(static_cast<size_t>(planned.tree->num_tokens()), -1);
    int64_t row = 0;
    for (const TokenRange& range : place.block.ranges)
      for (int32_t t = range.begin; t < range.end; ++t) row_of[static_cast<size_t>(t)] = row++;
    for (size_t s = 0; s < planned.sequences.size(); ++s) {
      RoutedExperts& routed = options_.routed_experts->at(static_cast<size_t>(planned.sequences[s]));
      routed.num_layers = used_TLK.size(1);
      routed.num_chosen = used_TLK.size(2);
      for (const int32_t t : planned.tree->path(static_cast<int64_t>(s)))
        if (const int64_t at = row_of[static_cast<size_t>(t)]; at >= 0)
          routed.experts.insert(routed.experts.end(), used + at * size, used + (at + 1) * size);
    }
  }

  // Called on the last stage only. Stores the boundary hidden states, which other blocks' heads read. Runs
  // the head if `runs_head`.
  void finish_forward(const BlockVisit& place, const at::Tensor& hidden_TD, bool runs_head) {
    Open& open = place.open;
    if (open.boundary_rows_E.defined()) {
      open.boundary_ED = of_all(open, hidden_TD).index_select(0, open.boundary_rows_E);
      if (backward_)
        open.d_boundary_ED = at::zeros(open.boundary_ED.sizes(),
                                       open.boundary_ED.options().dtype(accumulator_type(model_.dtype())));
    }
    if (runs_head) run_head(place, hidden_TD);
  }

  void backward_block(const BlockVisit& place) {
    const Block& block = place.block;
    Open& open = place.open;
    if (backward_) {
      at::AutoGradMode mode(true);
      if (!open.hidden_TD.defined()) recompute_block(place);
      else if (block.interior) upload_rows(place);  // a leaf's rows were uploaded with its forward
      if (ranks_ && !block.interior) place.stack.clear_above(block.stack_rows, block.num_tokens);
      const at::Tensor d_hidden_TD = model_.stage().is_last()
                                         ? head_gradient(place)
                                         : links_.receive(open.hidden_TD.sizes(), StageLinks::Way::kBackward);
      backpropagate(*open.context, open.hidden_TD, d_hidden_TD);
      if (!model_.stage().is_first()) {
        const at::Tensor& d_entered_TD = open.entered_TD.grad();
        links_.send(d_entered_TD.defined() ? d_entered_TD : at::zeros_like(open.entered_TD),
                    StageLinks::Way::kBackward);
      }
    }
    open = {};
    if (block.interior) place.stack.pop(block.num_tokens);
  }

  // Gradient of the final hidden states of this rank's tokens, model dtype. Undefined if nothing reads them.
  at::Tensor head_gradient(const BlockVisit& place) {
    Open& open = place.open;
    auto d_hidden_TD = run_head(place, open.hidden_TD);
    if (open.d_boundary_ED.defined()) {
      if (!d_hidden_TD.defined())
        d_hidden_TD =
            at::zeros({place.block.num_tokens, open.hidden_TD.size(1)}, open.d_boundary_ED.options());
      d_hidden_TD.index_add_(0, open.boundary_rows_E, open.d_boundary_ED);
    }
    if (!d_hidden_TD.defined()) return {};
    return (open.shared ? open.shared->own_of(d_hidden_TD) : d_hidden_TD).to(open.hidden_TD.scalar_type());
  }

  void recompute_block(const BlockVisit& place) {
    Open& open = place.open;
    auto pass = make_pass(place, options_.verify_recompute, /*reads_rows=*/true);
    if (pass.choice) {
      pass.choice->counts = nullptr;  // the first forward was counted
      pass.choice->chosen = std::move(open.choices);
    }
    pass.experts.use(std::move(open.experts));
    pass.experts.stop_counting();
    if (pass.router_losses) pass.router_losses->sums = nullptr;
    if (place.block.keep == RecomputePolicy::kAttention) pass.kept_outputs = &open.attention_outputs;
    open.context = std::make_unique<TreeContext>(std::move(pass));
    open.hidden_TD = run_pass(open, *open.context);
    open.shared = input_.shared;
  }

  // Adds to `upload` the indices of the block's head rows that this rank computes. Called on the last stage
  // only.
  void add_rows_of(const BlockVisit& place, HostToDeviceBatch& upload) {
    rows_of_ = &place.block;
    const BlockRows& all = place.tree.rows.blocks[place.index];
    if (ranks_) own_rows_ = rows_of_rank(all, ranks_->rank(), ranks_->size());
    if (all.num_rows() > 0) add_rows(upload, head_rows(place), row_indices_);
  }
  const BlockRows& head_rows(const BlockVisit& place) const {
    return ranks_ ? own_rows_ : place.tree.rows.blocks[place.index];
  }

  void upload_rows(const BlockVisit& place) {
    if (!model_.stage().is_last()) return;
    row_indices_ = {};
    HostToDeviceBatch upload(model_.device());
    add_rows_of(place, upload);
    send(upload);
  }

  void send(HostToDeviceBatch& upload) {
    upload.send();
    ++counts_.num_uploads;
  }

  // reads_rows: the block's head runs with this pass.
  TreeContext::Pass make_pass(const BlockVisit& place, bool verify_recompute, bool reads_rows) {
    const Block& block = place.block;
    PrefixKvStack& stack = place.stack;
    const int64_t rows = stack.num_rows();
    BOUGH_CHECK(block.interior ? rows == block.stack_rows + block.num_tokens : rows >= block.stack_rows,
                "a block expects ", block.stack_rows, " stack rows, the stack has ", rows);
    const bool by_pages = model_.batch_invariant() || options_.sparse.is_sparse();
    row_indices_ = {};
    HostToDeviceBatch upload(model_.device());
    make_pass_input({.tree = *place.tree.planned.tree,
                     .block = block,
                     .batch = batch_,
                     .stack_tokens = stack.tokens(),
                     .flat_counts = place.tree.flat_counts,
                     .recorded = options_.replays_experts ? &model_.config() : nullptr,
                     .context_ranks = ranks_,
                     .least_run = by_pages ? 0 : least_run()},
                    upload, input_);
    const bool is_last = model_.stage().is_last();
    const std::vector<int64_t>& boundary_rows = place.tree.rows.boundary_rows[place.index];
    at::Tensor boundary_rows_E;
    if (is_last && !boundary_rows.empty() && !place.open.boundary_rows_E.defined())
      upload.add(boundary_rows, &boundary_rows_E);
    if (is_last && reads_rows) add_rows_of(place, upload);
    send(upload);
    if (boundary_rows_E.defined())
      place.open.boundary_rows_E = boundary_rows_E.clone();  // a copy, to free the rest of the upload
    if (input_.shared) {
      input_.tokens_T = input_.tokens_T.index_select(0, input_.shared->own_tokens());
      input_.positions_T = input_.positions_T.index_select(0, input_.shared->own_tokens());
    }
    TreeContext::Pass pass{.stack = &stack,
                           .stack_rows = block.stack_rows,
                           .interior = block.interior,
                           .verify_recompute = verify_recompute,
                           .ends = input_.ends,
                           .scale = model_.config().attention_scale(),
                           .segments = input_.segments,
                           .shared = input_.shared};
    if (const ModelConfig& config = model_.config(); config.is_mixture()) {
      at::Tensor recorded_TLK = input_.experts_TLK;
      if (recorded_TLK.defined())
        recorded_TLK = recorded_TLK.view({-1, config.num_sparse_layers(), config.experts_per_token});
      pass.experts = ExpertRoutes(std::move(recorded_TLK), &counts_.routes);
      pass.router_losses = router_losses_;
      if (pass.router_losses) pass.router_losses->counts_T = input_.flat_counts_T;
    }
    if (backward_ && recomputes_layers(block.keep)) {
      pass.recomputes_layers = true;
      pass.layers_keep_attention = block.keep == RecomputePolicy::kLayerInputsAndAttention;
      pass.layers_on_host = block.keep == RecomputePolicy::kLayerInputsOnHost;
      pass.verify_layers = options_.verify_recompute;
    }
    if (!by_pages) return pass;
    TreePages pages(input_.ends.end_local, block.stack_rows, model_.config().num_kv_heads);
    if (options_.sparse.is_sparse()) {
      BlockChooser chooser(pages.segments(), input_.is_sampled, options_.sparse,
                           model_.config().num_kv_heads);
      if (chooser.chooses())
        pass.choice = {std::move(chooser),
                       std::vector<BlockChooser::Lists>(static_cast<size_t>(model_.config().num_layers)),
                       {},
                       &counts_.replays};
      if (pass.choice && !input_.replays.empty())
        for (const ChoosingQuery& query : pass.choice->chooser.queries())
          pass.choice->replays.push_back(input_.replays[static_cast<size_t>(query.token)]);
    }
    if (model_.batch_invariant() || pass.choice) pass.pages.emplace(std::move(pages));
    pass.is_batch_invariant = model_.batch_invariant();
    return pass;
  }

  int64_t least_run() const {
    if (options_.least_run > 0) return options_.least_run;
    return vendor_attends_runs(model_.device(), model_.dtype(), model_.config().head_dim, options_.same_bits)
               ? kLeastRun
               : 0;
  }

  // Runs the model: on tokens (first stage) or on the previous stage's hidden states.
  at::Tensor run_pass(Open& open, TreeContext& context) {
    if (!open.entered_TD.defined()) return model_.forward(input_.tokens_T, input_.positions_T, context);
    if (at::GradMode::is_enabled()) open.entered_TD.requires_grad_(true);
    return model_.forward(open.entered_TD, input_.positions_T, context);
  }

  // Hidden states of all tokens of the pass, gathered from all context-parallel ranks.
  at::Tensor of_all(const Open& open, const at::Tensor& hidden_TD) const {
    return open.shared ? open.shared->gather(hidden_TD.detach()) : hidden_TD.detach();
  }

  // Gradient of the block's hidden states from its head rows; undefined if the block has none. Gradients of
  // boundary hidden states of ancestor blocks are added to those blocks' d_boundary_ED. With context
  // parallelism each rank computes a part of the head rows.
  at::Tensor run_head(const BlockVisit& place, const at::Tensor& own_hidden_TD) {
    std::vector<Open>& opened = place.tree.open;
    if (place.tree.rows.blocks[place.index].num_rows() == 0) return {};
    BOUGH_CHECK(rows_of_ == &place.block, "a block's head runs before its row indices are set");
    const at::Tensor hidden_TD = of_all(place.open, own_hidden_TD);
    const BlockRows& rows = head_rows(place);
    std::vector<at::Tensor> sources = {hidden_TD};
    for (const auto& outside : rows.outside)
      sources.push_back(opened[outside.block].boundary_ED.narrow(0, outside.boundary_row, 1));
    const auto source_SD = sources.size() == 1 ? sources[0] : at::cat(sources);
    at::Tensor d_source_SD;
    for (BlockHead* head : heads_) {
      const auto own_SD = head->run(rows, row_indices_, source_SD);
      if (d_source_SD.defined() && own_SD.defined()) d_source_SD.add_(own_SD);
      else if (own_SD.defined()) d_source_SD = own_SD;
    }
    if (!d_source_SD.defined()) return {};
    if (ranks_) all_reduce_(d_source_SD, *ranks_);
    const int64_t num_tokens = hidden_TD.size(0);
    for (size_t i = 0; i < rows.outside.size(); ++i)
      opened[rows.outside[i].block].d_boundary_ED[rows.outside[i].boundary_row].add_(
          d_source_SD[num_tokens + static_cast<int64_t>(i)]);
    return d_source_SD.narrow(0, 0, num_tokens);
  }

  void backpropagate(const TreeContext& context, const at::Tensor& hidden_TD, const at::Tensor& d_hidden_TD) {
    torch::autograd::variable_list roots, gradients;
    if (d_hidden_TD.defined()) {
      roots.push_back(hidden_TD);
      gradients.push_back(d_hidden_TD);
    }
    for (const auto& anchor : context.anchors()) {
      roots.push_back(anchor);
      gradients.push_back(at::empty_like(anchor));
    }
    torch::autograd::backward(roots, gradients);
  }

  Model& model_;
  const ExecutorOptions& options_;
  const Plan& plan_;
  const TrainBatch& batch_;
  BlockCounts counts_;
  std::vector<BlockHead*> heads_;
  bool backward_;
  Communicator* const ranks_;  // the context-parallel group, or nullptr
  const Pipeline pipeline_;
  StageLinks links_;
  std::vector<StackSlot> stacks_;
  std::vector<std::unique_ptr<Tree>> trees_;   // started and not finished
  std::optional<RouterLosses> router_losses_;  // without counts_T
  PassInput input_;                            // of the current pass
  const Block* rows_of_ = nullptr;             // the block of row_indices_
  BlockRows own_rows_;                         // with context parallelism: this rank's
  RowIndices row_indices_;
};

}  // namespace

BlockCounts execute_blocks(Model& model, const ExecutorOptions& options, const Plan& plan,
                           const TrainBatch& batch, std::vector<BlockHead*> heads, bool backward) {
  return PlanExecution(model, options, plan, batch, std::move(heads), backward).run();
}

bool has_only_leaf_blocks(const Plan& plan) {
  for (const PlannedTree& planned : plan.trees)
    for (const Block& block : planned.blocks)
      if (block.interior || block.above >= 0 || planned.blocks.size() > 1) return false;
  return true;
}

class TwoPhases::Execution : public PlanExecution {
 public:
  using PlanExecution::PlanExecution;
};

TwoPhases::TwoPhases(Model& model, const ExecutorOptions& options, const Plan& plan, const TrainBatch& batch,
                     std::vector<BlockHead*> heads) {
  BOUGH_CHECK(has_only_leaf_blocks(plan), "strategy ", plan.strategy, " has interior blocks");
  BOUGH_CHECK(model.is_unsharded() && !options.ranks, "the model or the batch is divided among ranks");
  execution_ = std::make_unique<Execution>(model, options, plan, batch, std::move(heads), /*backward=*/true);
  execution_->run_forward_phase();
}
TwoPhases::~TwoPhases() = default;

void TwoPhases::backward(std::vector<BlockHead*> heads) {
  BOUGH_CHECK(execution_, "the backward phase ran before");
  const std::unique_ptr<Execution> execution = std::move(execution_);
  execution->run_backward_phase(std::move(heads));
}

}  // namespace bough
