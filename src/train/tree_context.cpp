#include "train/tree_context.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/parameter.h"

namespace bough {

PrefixKvStack::PrefixKvStack(const ModelConfig& config, int64_t capacity, at::ScalarType dtype,
                             at::Device device, bool with_gradients)
    : capacity_(capacity) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  const std::vector<int64_t> sizes = {capacity, config.num_kv_heads, config.head_dim};
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    k_.push_back(at::empty(sizes, options));
    v_.push_back(at::empty(sizes, options));
    if (!with_gradients) continue;
    d_k_.push_back(at::empty(sizes, options.dtype(accumulator_type(dtype))));
    d_v_.push_back(at::empty(sizes, options.dtype(accumulator_type(dtype))));
  }
}

void PrefixKvStack::push(int32_t first_token, int32_t end_token) {
  const int64_t begin = num_rows();
  const int64_t count = end_token - first_token;
  BOUGH_CHECK(begin + count <= capacity_, "cannot push ", count, " rows: the stack has ", begin,
              ", its capacity is ", capacity_);
  for (int32_t t = first_token; t < end_token; ++t) tokens_.push_back(t);
  for (auto& gradient : d_k_) gradient.narrow(0, begin, count).zero_();
  for (auto& gradient : d_v_) gradient.narrow(0, begin, count).zero_();
}

void PrefixKvStack::clear_above(int64_t begin, int64_t count) {
  BOUGH_CHECK(num_rows() <= begin && begin + count <= capacity_, "cannot clear ", count, " rows above row ",
              begin, ": the stack has ", num_rows(), ", its capacity is ", capacity_);
  for (auto& gradient : d_k_) gradient.narrow(0, begin, count).zero_();
  for (auto& gradient : d_v_) gradient.narrow(0, begin, count).zero_();
}

void PrefixKvStack::pop(int64_t count) {
  BOUGH_CHECK(count <= num_rows(), "cannot pop ", count, " of ", num_rows(), " rows");
  tokens_.resize(tokens_.size() - count);
}

void TreeContext::Pass::Choice::replay(int64_t layer, BlockChooser::Lists& lists) {
  if (counts) counts->lists += std::ssize(lists);
  if (replays.empty() || lists.empty()) return;
  const size_t heads = lists.size() / replays.size();
  const int64_t first = chooser.policy().first_blocks;
  const auto layers = chosen.size() - static_cast<size_t>(chooser.policy().dense_layers);
  for (size_t i = 0; i < replays.size(); ++i) {
    if (replays[i].empty()) continue;
    const auto length = static_cast<size_t>(chooser.policy().chosen_of(chooser.queries()[i].budget));
    BOUGH_CHECK(replays[i].size() == layers * heads * length, "the rollout has ", replays[i].size(),
                " block choices of a token, expected ", length, " in ", heads, " heads and ", layers,
                " layers");
    for (size_t g = 0; g < heads; ++g) {
      const auto kept = replays[i].subspan(
          ((static_cast<size_t>(layer) - static_cast<size_t>(chooser.policy().dense_layers)) * heads + g) *
              length,
          length);
      std::vector<int32_t>& list = lists[i * heads + g];
      if (counts) {
        ++counts->replayed;
        counts->different += !std::equal(kept.begin(), kept.end(), list.begin() + first);
      }
      BOUGH_CHECK(std::ssize(list) == chooser.queries()[i].budget && kept.front() >= first &&
                      kept.back() < list[static_cast<size_t>(first) + length] &&
                      std::is_sorted(kept.begin(), kept.end()),
                  "the rollout has block choices outside the token's context");
      std::copy(kept.begin(), kept.end(), list.begin() + first);
    }
  }
}

namespace {
using Pass = TreeContext::Pass;

TreeAttentionInput make_input(const Pass& pass, int64_t layer, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v) {
  return {q,
          k,
          v,
          pass.stack->k(layer, 0, pass.stack_rows),
          pass.stack->v(layer, 0, pass.stack_rows),
          pass.ends.end_local,
          pass.scale,
          pass.ends.spans};
}

void write_rows(const Pass& pass, int64_t layer, const at::Tensor& k, const at::Tensor& v) {
  auto k_rows = pass.stack->k(layer, pass.stack_rows, k.size(0));
  auto v_rows = pass.stack->v(layer, pass.stack_rows, v.size(0));
  if (pass.verify_recompute)
    BOUGH_CHECK(at::equal(k_rows, k) && at::equal(v_rows, v),
                "a recompute differs from its first forward, layer ", layer, ", stack row ", pass.stack_rows);
  k_rows.copy_(k);
  v_rows.copy_(v);
}

bool is_chosen(const Pass& pass, int64_t layer) {
  return pass.choice && layer >= pass.choice->chooser.policy().dense_layers;
}

// layer_pages: the pages of the layer if its queries select pages; otherwise undefined.
TreeAttentionOutput forward(Pass& pass, int64_t layer, const TreeAttentionInput& input,
                            const at::Tensor& layer_pages) {
  if (is_chosen(pass, layer))
    return tree_attention_forward_sparse(input, layer_pages, {*pass.pages, pass.choice->chooser},
                                         pass.choice->chosen[layer]);
  if (pass.is_batch_invariant) return tree_attention_forward_paged(input, *pass.pages);
  return pass.segments.empty() ? tree_attention_forward(input)
                               : tree_attention_forward_by_segments(input, pass.segments);
}

TreeAttentionOutput attention_output(Pass& pass, int64_t layer, const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& v) {
  at::Tensor layer_pages;
  const auto pages = [&] {
    if (!layer_pages.defined()) layer_pages = fill_pages(make_input(pass, layer, q, k, v), *pass.pages);
    return layer_pages;
  };
  if (is_chosen(pass, layer)) {
    BlockChooser::Lists& chosen = pass.choice->chosen[layer];
    if (chosen.empty() || pass.verify_recompute) {
      BlockChooser::Lists lists =
          choose_in_tree(make_input(pass, layer, q, k, v), pages(), {*pass.pages, pass.choice->chooser});
      pass.choice->replay(layer, lists);
      BOUGH_CHECK(chosen.empty() || chosen == lists,
                  "a recompute selects other blocks than its first forward, layer ", layer);
      chosen = std::move(lists);
    }
  }
  const auto computed = [&] {
    if (pass.shared)
      return pass.shared->forward({*pass.stack, layer, q, k, v, pass.scale}, pass.verify_recompute);
    return forward(pass, layer, make_input(pass, layer, q, k, v),
                   is_chosen(pass, layer) ? pages() : at::Tensor());
  };
  if (!pass.kept_outputs) return computed();
  const auto& kept = (*pass.kept_outputs)[layer];
  if (pass.verify_recompute)
    BOUGH_CHECK(at::equal(kept.o_TNH, computed().o_TNH),
                "a recompute differs from its first forward in attention's output, layer ", layer);
  return {kept.o_TNH.detach(), kept.lse_TN};  // otherwise the kept output would hold this graph
}

TreeAttentionGradient gradient(Pass& pass, int64_t layer, const TreeAttentionInput& input,
                               const TreeAttentionOutput& out, const at::Tensor& d_o) {
  const at::Tensor d_k = pass.stack->d_k(layer, 0, pass.stack_rows),
                   d_v = pass.stack->d_v(layer, 0, pass.stack_rows);
  if (is_chosen(pass, layer))
    return tree_attention_backward_sparse(input, out, d_o, d_k, d_v, {*pass.pages, pass.choice->chooser},
                                          pass.choice->chosen[layer]);
  if (pass.segments.empty()) return tree_attention_backward(input, out, d_o, d_k, d_v);
  return tree_attention_backward_by_segments(input, out, d_o, d_k, d_v, pass.segments);
}

struct AttendFunction : torch::autograd::Function<AttendFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, Pass* pass, int64_t layer) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto out = attention_output(*pass, layer, q, k, v);
    if (pass->keep_outputs) pass->keep_outputs->push_back(out);
    if (pass->interior && !pass->shared) write_rows(*pass, layer, k, v);
    context->save_for_backward({q, k, v, out.o_TNH, out.lse_TN});
    context->saved_data["pass"] =
        reinterpret_cast<int64_t>(pass);  // the executor keeps it until backward is done
    context->saved_data["layer"] = layer;
    context->set_materialize_grads(false);
    return {out.o_TNH, at::empty({0}, q.options())};
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    auto& pass = *reinterpret_cast<Pass*>(context->saved_data["pass"].toInt());
    const int64_t layer = context->saved_data["layer"].toInt();
    const auto saved = context->get_saved_variables();
    const auto &q = saved[0], &k = saved[1];
    TreeAttentionGradient d;
    const auto round = [&](const at::Tensor& x) { return x.defined() ? x.to(k.scalar_type()) : x; };
    if (pass.shared) {
      const at::Tensor d_o = d_outputs[0].defined() ? d_outputs[0].contiguous() : at::Tensor();
      d = pass.shared->backward({*pass.stack, layer, q, k, saved[2], pass.scale}, {saved[3], saved[4]}, d_o);
      return {d.d_q_TNH, round(d.d_k_TGH), round(d.d_v_TGH), {}, {}};
    }
    // The outputs' gradient is undefined if backward came here only through the anchor. This happens in the
    // last layer of a pass without a loss.
    if (d_outputs[0].defined())
      d = gradient(pass, layer, make_input(pass, layer, q, k, saved[2]), {saved[3], saved[4]},
                   d_outputs[0].contiguous());
    if (pass.interior) {
      const auto d_k = pass.stack->d_k(layer, pass.stack_rows, k.size(0));
      const auto d_v = pass.stack->d_v(layer, pass.stack_rows, k.size(0));
      d.d_k_TGH = d.d_k_TGH.defined() ? d.d_k_TGH.add_(d_k) : d_k;
      d.d_v_TGH = d.d_v_TGH.defined() ? d.d_v_TGH.add_(d_v) : d_v;
    }
    return {d.d_q_TNH, round(d.d_k_TGH), round(d.d_v_TGH), {}, {}};
  }
};
}  // namespace

// One layer that is recomputed in backward. The layer's graph is built in backward and freed at its end. The
// layer's output has an anchor, so that its backward runs even if no later layer needs a gradient. The anchor
// of the layer's attention is a root of the graph that backward builds.
struct LayerFunction : torch::autograd::Function<LayerFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x_TD, TreeContext* pass,
                               int64_t index) {
    const bool on_host = pass->pass_.layers_on_host;
    if (on_host) pass->layer_inputs_.put(x_TD.detach());
    const at::Tensor y_TD = pass->layers_[static_cast<size_t>(index)](x_TD, true);
    context->save_for_backward(
        {on_host ? at::Tensor() : x_TD, pass->pass_.verify_layers ? y_TD : at::Tensor()});
    context->saved_data["pass"] = reinterpret_cast<int64_t>(pass);
    context->saved_data["index"] = index;
    context->set_materialize_grads(false);
    return {y_TD, at::empty({0}, x_TD.options())};
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    auto& pass = *reinterpret_cast<TreeContext*>(context->saved_data["pass"].toInt());
    const auto index = static_cast<size_t>(context->saved_data["index"].toInt());
    const auto saved = context->get_saved_variables();
    const at::Tensor x_TD = (pass.pass_.layers_on_host ? pass.layer_inputs_.take() : saved[0]).detach();
    x_TD.requires_grad_(true);
    pass.begin_backward();
    variable_list roots, gradients;
    {
      at::AutoGradMode with_grad(true);
      at::Tensor y_TD = pass.layers_[index](x_TD, /*output_is_read=*/saved[1].defined());
      pass.layers_[index] = {};
      BOUGH_CHECK(!saved[1].defined() || at::equal(saved[1], y_TD),
                  "a recompute differs from its first forward, layer ", index);
      roots = {std::move(pass.anchors_[index])};
      if (at::Tensor& router = pass.router_anchors_[index]; router.defined())
        roots.push_back(std::move(router));
      for (const at::Tensor& anchor : roots) gradients.push_back(at::empty_like(anchor));
      if (d_outputs[0].defined()) {
        roots.push_back(std::move(y_TD));
        gradients.push_back(std::move(d_outputs[0]));
      }
    }
    torch::autograd::backward(roots, gradients);
    if (pass.pass_.layers_keep_attention) pass.layer_outputs_[index] = {};
    return {x_TD.grad(), {}, {}};
  }
};

TreeContext::TreeContext(Pass pass) : pass_(std::move(pass)) {
  if (pass_.layers_keep_attention) pass_.keep_outputs = &layer_outputs_;
}

// Page selections of the forward pass are not counted again. Attention outputs that forward kept are reused.
void TreeContext::begin_backward() {
  if (pass_.choice) pass_.choice->counts = nullptr;
  pass_.experts.stop_counting();
  if (pass_.router_losses) pass_.router_losses->sums = nullptr;
  pass_.verify_recompute = pass_.verify_layers;
  if (!pass_.layers_keep_attention) return;
  pass_.keep_outputs = nullptr;
  pass_.kept_outputs = &layer_outputs_;
}

at::Tensor TreeContext::layer(int64_t index, const at::Tensor& x_TD, const Layer& compute) {
  if (!pass_.recomputes_layers) return compute(x_TD, true);
  layers_.push_back(compute);
  const auto outputs = LayerFunction::apply(x_TD, this, index);
  anchors_[static_cast<size_t>(index)] = outputs[1];
  return outputs[0];
}

std::vector<BlockChooser::Lists> TreeContext::take_choices() {
  return pass_.choice ? std::move(pass_.choice->chosen) : std::vector<BlockChooser::Lists>();
}

at::Tensor TreeContext::attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                               const at::Tensor& v_TGH) {
  const auto outputs =
      AttendFunction::apply(q_TNH.contiguous(), k_TGH.contiguous(), v_TGH.contiguous(), &pass_, layer);
  anchors_.resize(std::max(anchors_.size(), static_cast<size_t>(layer) + 1));
  router_anchors_.resize(anchors_.size());
  anchors_[static_cast<size_t>(layer)] = outputs[1];
  return outputs[0];
}

at::Tensor TreeContext::route(int64_t layer, const at::Tensor& logits_TE, int64_t num_chosen) {
  const at::Tensor experts_TK = pass_.experts.route(layer, logits_TE, num_chosen);
  if (!pass_.router_losses) return experts_TK;
  pass_.router_losses->count(logits_TE.detach(), experts_TK);
  if (at::GradMode::is_enabled())
    router_anchors_[static_cast<size_t>(layer)] = pass_.router_losses->anchor(logits_TE);
  return experts_TK;
}

std::vector<at::Tensor> TreeContext::anchors() const {
  std::vector<at::Tensor> all = anchors_;
  for (const at::Tensor& anchor : router_anchors_)
    if (anchor.defined()) all.push_back(anchor);
  return all;
}

at::Tensor sequence_logits(const Model& model, const std::vector<int32_t>& ids, const RoutedExperts& routed) {
  const at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(ids.size());
  PrefixKvStack stack(model.config(), 0, model.dtype(), model.device(), false);
  // Plain causal attention: every token attends to all tokens before it.
  const std::vector<int32_t> end_local(ids.size(), static_cast<int32_t>(count));
  const KeyEnds ends = upload_key_ends(end_local, 0, model.device());
  TreeContext::Pass pass{&stack, 0, false, false, ends, model.config().attention_scale()};
  if (!routed.empty()) {
    std::vector<int64_t> recorded(routed.experts.begin(), routed.experts.end());
    recorded.resize(static_cast<size_t>(count * routed.row_size()), -1);
    pass.experts = ExpertRoutes(at::tensor(recorded, at::kLong)
                                    .view({count, routed.num_layers, routed.num_chosen})
                                    .to(model.device()));
  }
  TreeContext context(std::move(pass));
  const at::Tensor tokens_T = at::tensor(ids, at::kInt).to(at::kLong).to(model.device());
  return model.logits(model.forward(tokens_T, at::arange(count, at::kLong).to(model.device()), context));
}

}  // namespace bough
