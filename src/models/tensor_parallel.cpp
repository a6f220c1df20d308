#include "models/tensor_parallel.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/common/host_snapshot.h"
#include "models/model.h"

namespace bough {

ModelConfig shard_config(const ModelConfig& whole, int64_t rank, int64_t size) {
  BOUGH_CHECK(rank >= 0 && rank < size, "rank ", rank, " of ", size);
  if (size == 1) return whole;
  const auto refuse = [&](const std::string& what) {
    throw UserError(str("tensor parallelism: got ", size, " ranks for a model with ", what));
  };
  if (whole.is_mixture())
    refuse(
        str(whole.num_experts, " experts (", whole.family->name, "), which no ranks share; expected 1 (t1)"));
  if (whole.num_heads % size != 0) refuse(str(whole.num_heads, " heads; expected a divisor of this number"));
  if (whole.num_kv_heads % size != 0 && size % whole.num_kv_heads != 0)
    refuse(str(whole.num_kv_heads, " key heads; expected a divisor or a multiple of this number"));
  if (whole.intermediate_size % size != 0)
    refuse(str("a feed-forward width of ", whole.intermediate_size, "; expected a divisor of this width"));
  if (whole.vocab_size < size)
    refuse(str("a vocabulary of ", whole.vocab_size, " tokens; expected at most as many ranks"));
  ModelConfig own = whole;
  own.num_heads /= size;
  own.num_kv_heads = std::max<int64_t>(1, whole.num_kv_heads / size);
  own.intermediate_size /= size;
  return own;
}

Slice vocabulary_slice(int64_t vocab_size, int64_t rank, int64_t size) {
  const int64_t most = (vocab_size + size - 1) / size;
  const int64_t first = std::min(vocab_size, rank * most);
  return {first, std::min(most, vocab_size - first)};
}

namespace {
Element element_of(const at::Tensor& values) {
  switch (values.scalar_type()) {
    case at::kDouble: return Element::kDouble;
    case at::kFloat: return Element::kFloat;
    case at::kLong: return Element::kInt64;
    default:
      BOUGH_CHECK(false, "sums over ranks are in fp64, fp32 and int64, got ",
                  c10::toString(values.scalar_type()));
  }
}
}  // namespace

at::Device buffer_device(const at::Tensor& values, const Communicator& ranks) {
  return values.is_cuda() && ranks.takes_device_buffers() ? values.device() : at::kCPU;
}

void all_reduce_(const at::Tensor& values, Communicator& ranks) {
  if (values.numel() == 0 || ranks.size() == 1) return;
  const auto type = values.scalar_type() == at::kBFloat16 ? at::kFloat : values.scalar_type();
  const at::Tensor buffer = values.to(buffer_device(values, ranks), type).contiguous();
  ranks.run({.kind = Collective::Kind::kAllReduce,
             .send = buffer.data_ptr(),
             .receive = buffer.data_ptr(),
             .count = buffer.numel(),
             .element = element_of(buffer),
             .on_device = buffer.is_cuda()});
  if (!buffer.is_same(values)) values.copy_(buffer);
}

at::Tensor all_gather_stacked(const at::Tensor& own, Communicator& ranks) {
  const at::Tensor buffer = own.to(buffer_device(own, ranks)).contiguous();
  std::vector<int64_t> sizes = buffer.sizes().vec();
  sizes.insert(sizes.begin(), ranks.size());
  const at::Tensor all = at::empty(sizes, buffer.options());
  ranks.run({.kind = Collective::Kind::kAllGather,
             .send = buffer.data_ptr(),
             .receive = all.data_ptr(),
             .count = buffer.numel() * static_cast<int64_t>(buffer.element_size()),
             .on_device = buffer.is_cuda()});
  return all.to(own.device());
}

namespace {
Communicator& ranks_of(AutogradContext* context) {
  return *reinterpret_cast<Communicator*>(context->saved_data["ranks"].toInt());
}

struct CopyFunction : torch::autograd::Function<CopyFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, Communicator* ranks) {
    context->saved_data["ranks"] = reinterpret_cast<int64_t>(ranks);
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const at::Tensor d_x = d_outputs[0].contiguous().clone();
    all_reduce_(d_x, ranks_of(context));
    return {d_x, {}};
  }
};

struct SumFunction : torch::autograd::Function<SumFunction> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x, Communicator* ranks) {
    const at::Tensor sum = x.contiguous().clone();
    all_reduce_(sum, *ranks);
    return sum;
  }
  static variable_list backward(AutogradContext*, variable_list d_outputs) { return {d_outputs[0], {}}; }
};
}  // namespace

at::Tensor copy_to_ranks(const at::Tensor& x, Communicator& ranks) {
  return CopyFunction::apply(x, &ranks);
}
at::Tensor sum_over_ranks(const at::Tensor& x, Communicator& ranks) {
  return SumFunction::apply(x, &ranks);
}

std::vector<int64_t> unsharded_sizes(const Parameter& parameter, const Parameter::Part& part) {
  std::vector<int64_t> sizes = parameter.value.sizes().vec();
  sizes[0] = part.end - part.begin;
  if (part.whole > 0) sizes[static_cast<size_t>(part.dimension)] = part.whole;
  return sizes;
}

at::Tensor own_piece(const at::Tensor& whole, const Parameter& parameter, const Parameter::Part& part) {
  const int64_t count = part.dimension == 0 ? part.end - part.begin : parameter.value.size(part.dimension);
  return whole.narrow(part.dimension, part.first, count);
}

at::Tensor gather_pieces(const at::Tensor& own, const Parameter& parameter, const Parameter::Part& part,
                         Communicator& ranks) {
  if (part.whole == 0 || ranks.size() == 1) return own;
  // Pieces may differ in size, and several ranks may have the same piece.
  const int64_t count = own.size(part.dimension);
  const at::Tensor sizes = all_gather_stacked(at::tensor({part.first, count}, at::kLong), ranks);
  const int64_t most = sizes.select(1, 1).max().item<int64_t>();
  std::vector<int64_t> padded_sizes = own.sizes().vec();
  padded_sizes[static_cast<size_t>(part.dimension)] = most;
  // on the CPU: unsharded tensors are gathered to be written or sent on
  at::Tensor padded = own.to(at::kCPU);
  if (count < most) {
    padded = at::zeros(padded_sizes, padded.options());
    padded.narrow(part.dimension, 0, count).copy_(own);
  }
  const at::Tensor all = all_gather_stacked(padded, ranks);
  const at::Tensor whole = at::zeros(unsharded_sizes(parameter, part), padded.options());
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    const int64_t begin = sizes[rank][0].item<int64_t>(), size = sizes[rank][1].item<int64_t>();
    whole.narrow(part.dimension, begin, size).copy_(all[rank].narrow(part.dimension, 0, size));
  }
  return whole;
}

void add_pieces(NamedTensors& tensors, const std::string& name, const at::Tensor& pieces) {
  const auto same =
      std::find_if(tensors.rbegin(), tensors.rend(), [&](const auto& t) { return t.first == name; });
  if (same != tensors.rend()) same->second.add_(pieces);
  else tensors.emplace_back(name, pieces);
}

void gather_weights(Model& own, Model* whole) {
  std::map<std::string, at::Tensor> to;
  if (whole)
    for (Parameter* parameter : whole->trained_parameters())
      for (const Parameter::Part& part : parameter->parts) to[part.name] = parameter->part_value(part);
  NamedTensors gathered;  // tensors of the local layers
  for (const Parameter* parameter : own.trained_parameters())
    for (const Parameter::Part& part : parameter->parts) {
      const at::Tensor value = parameter->part_value(part);
      if (!own.tensor_ranks()) gathered.emplace_back(part.name, value);
      else add_pieces(gathered, part.name, gather_pieces(value, *parameter, part, *own.tensor_ranks()));
    }
  const auto use = [&](const std::string& name, const at::Tensor& tensor) { to.at(name).copy_(tensor); };
  const bool is_first = !own.tensor_ranks() || own.tensor_ranks()->rank() == 0;
  if (own.ranks().stages && is_first) gather_to_first_stage(gathered, *own.ranks().stages, use);
  else if (whole)
    for (const auto& [name, tensor] : gathered) use(name, tensor);
}

std::shared_ptr<Model> snapshot_of(const Model& model, bool copies) {
  std::shared_ptr<Model> view = model.share();
  if (!model.is_unsharded()) {
    const bool is_first =
        (!model.tensor_ranks() || model.tensor_ranks()->rank() == 0) && model.stage().is_first();
    std::shared_ptr<Model> whole =
        is_first ? make_model(model.unsharded_config(), model.dtype(), at::kCPU) : nullptr;
    gather_weights(*view, whole.get());
    return whole;
  }
  HostCopier copier;
  if (copies)
    for (Parameter* parameter : view->trained_parameters()) {
      parameter->value = copier.copy(parameter->value);
      parameter->main_grad = at::Tensor();
    }
  return view;
}

void sum_copied_gradients(const std::vector<Parameter*>& parameters, Communicator& ranks) {
  // One all-reduce for all copied pieces. Each rank writes its piece to its place in a tensor of the
  // unsharded size, and leaves the rest 0.
  std::vector<at::Tensor> flat;
  const auto each = [&](const auto& use) {
    for (const Parameter* parameter : parameters)
      for (const Parameter::Part& part : parameter->parts)
        if (part.copies > 1 && parameter->main_grad.defined()) use(*parameter, part);
  };
  each([&](const Parameter& parameter, const Parameter::Part& part) {
    const at::Tensor own = parameter.part_grad(part);
    at::Tensor whole = at::zeros(unsharded_sizes(parameter, part), own.options());
    own_piece(whole, parameter, part).copy_(own);
    flat.push_back(whole.view(-1));
  });
  if (flat.empty()) return;
  const at::Tensor sum = at::cat(flat);
  all_reduce_(sum, ranks);
  size_t index = 0;
  int64_t at = 0;
  each([&](const Parameter& parameter, const Parameter::Part& part) {
    const int64_t count = flat[index++].numel();
    const at::Tensor whole = sum.narrow(0, at, count).view(unsharded_sizes(parameter, part));
    at += count;
    const at::Tensor own = parameter.part_grad(part);
    own.copy_(own_piece(whole, parameter, part));
    if (!part.sums_copies) own.div_(static_cast<double>(part.copies));
  });
}

}  // namespace bough
