#include "train/collective_buckets.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "base/error.h"
#include "models/tensor_parallel.h"

namespace bough {

namespace {

// A tensor is seen as a matrix with one row per rank: [rows, most]. Row r has the elements of rank r, and the
// last rows may be incomplete. A bucket has columns of one or more such matrices.
struct Columns {
  at::Tensor flat;
  int64_t most;          // columns of the matrix
  int64_t begin, count;  // the columns in the bucket

  int64_t count_in(int64_t row) const {
    return std::clamp<int64_t>(flat.numel() - row * most - begin, 0, count);
  }
  at::Tensor in_row(int64_t row) const {
    const int64_t present = count_in(row);
    return flat.narrow(0, present > 0 ? row * most + begin : 0, present);
  }
};
using Bucket = std::vector<Columns>;

int64_t width_of(const Bucket& bucket) {
  int64_t width = 0;
  for (const Columns& columns : bucket) width += columns.count;
  return width;
}

// Cuts the tensors' matrices of `rows` rows into buckets. A bucket has one dtype.
template <class ColumnsOf>
std::vector<Bucket> cut(const std::vector<at::Tensor>& tensors, int64_t rows, int64_t bucket_bytes,
                        const ColumnsOf& columns_of) {
  std::map<at::ScalarType, std::vector<at::Tensor>> by_type;
  for (const at::Tensor& tensor : tensors) {
    BOUGH_CHECK(tensor.is_contiguous() && tensor.device() == tensors.front().device(),
                "got a tensor of sizes ", tensor.sizes(), " and strides ", tensor.strides(), " on ",
                tensor.device().str(), "; expected a contiguous one on ", tensors.front().device().str());
    by_type[tensor.scalar_type()].push_back(tensor.view(-1));
  }
  std::vector<Bucket> buckets;
  for (const auto& [type, of_type] : by_type) {
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(type));
    const int64_t capacity = std::max<int64_t>(1, bucket_bytes / (rows * element_bytes));
    int64_t width = 0;
    for (const at::Tensor& flat : of_type) {
      const int64_t most = columns_of(flat.numel());
      for (int64_t begin = 0; begin < most;
           begin = buckets.back().back().begin + buckets.back().back().count) {
        if (width == 0) buckets.emplace_back();
        const int64_t count = std::min(most - begin, capacity - width);
        buckets.back().push_back({flat, most, begin, count});
        width = (width + count) % capacity;
      }
    }
  }
  return buckets;
}

// Copies the elements of rows [0, rows) between the tensors and `packed`, [rows, width]. Elements of `packed`
// that no tensor has become 0.
void exchange(const Bucket& bucket, const at::Tensor& packed, bool to_packed) {
  int64_t at = 0;
  for (const Columns& columns : bucket) {
    const at::Tensor part = packed.narrow(1, at, columns.count);
    at += columns.count;
    const auto copy = [&](const at::Tensor& of_tensor, const at::Tensor& of_packed) {
      if (to_packed) of_packed.copy_(of_tensor);
      else of_tensor.copy_(of_packed);
    };
    int64_t num_full = 0;
    while (num_full < packed.size(0) && columns.count_in(num_full) == columns.count) ++num_full;
    if (num_full > 0)
      copy(columns.flat.as_strided({num_full, columns.count}, {columns.most, 1},
                                   columns.flat.storage_offset() + columns.begin),
           part.narrow(0, 0, num_full));
    if (num_full == packed.size(0)) continue;
    if (to_packed) part.narrow(0, num_full, packed.size(0) - num_full).zero_();
    const at::Tensor last = columns.in_row(num_full);
    copy(last, part[num_full].narrow(0, 0, last.numel()));
  }
}

// `packed` of all rows, on the device of the collective call.
at::Tensor packed_for(const Bucket& bucket, int64_t rows, const Communicator& ranks) {
  const at::Tensor packed = at::empty({rows, width_of(bucket)}, bucket.front().flat.options());
  exchange(bucket, packed, true);
  return packed.to(buffer_device(packed, ranks));
}

// The sum over ranks of this rank's row of `send`, [width].
at::Tensor sum_of_row(const at::Tensor& send, Communicator& ranks, bool fixed) {
  const int64_t width = send.size(1);
  if (fixed) {
    // Each rank receives its row from every rank, as many bytes as in a reduce-scatter, and sums the received
    // rows in a fixed order.
    at::Tensor parts = at::empty_like(send);
    ranks.run({.kind = Collective::Kind::kAllToAll,
               .send = send.data_ptr(),
               .receive = parts.data_ptr(),
               .count = width * static_cast<int64_t>(send.element_size()),
               .on_device = send.is_cuda()});
    for (int64_t step = 1; step < ranks.size(); step *= 2)
      for (int64_t rank = 0; rank < ranks.size(); rank += 2 * step) parts[rank].add_(parts[rank + step]);
    return parts[0];
  }
  BOUGH_CHECK(send.scalar_type() == at::kDouble || send.scalar_type() == at::kFloat, "sum over ranks: got ",
              c10::toString(send.scalar_type()), ", expected fp32 or fp64");
  const at::Tensor own = at::empty({width}, send.options());
  ranks.run({.kind = Collective::Kind::kReduceScatter,
             .send = send.data_ptr(),
             .receive = own.data_ptr(),
             .count = width,
             .element = own.scalar_type() == at::kDouble ? Element::kDouble : Element::kFloat,
             .on_device = own.is_cuda()});
  return own;
}

}  // namespace

ElementShare share_of(int64_t num_elements, const Communicator* ranks, bool fixed) {
  const int64_t size = ranks ? ranks->size() : 1, rank = ranks ? ranks->rank() : 0;
  const int64_t shares = fixed ? kFixedShares : size;
  const int64_t most = shares / size * ((num_elements + shares - 1) / shares);
  const int64_t begin = std::min(num_elements, rank * most);
  return {most, begin, std::min(most, num_elements - begin)};
}

void sum_in_buckets_(const std::vector<at::Tensor>& tensors, Communicator& ranks, int64_t bucket_bytes) {
  for (const Bucket& bucket : cut(tensors, 1, bucket_bytes, [](int64_t numel) { return numel; })) {
    const at::Tensor sum = packed_for(bucket, 1, ranks);
    all_reduce_(sum, ranks);
    exchange(bucket, sum.to(bucket.front().flat.device()), false);
  }
}

void reduce_scatter_(const std::vector<at::Tensor>& tensors, Communicator& ranks, bool fixed,
                     int64_t bucket_bytes) {
  const auto columns_of = [&](int64_t numel) { return share_of(numel, &ranks, fixed).most; };
  for (const Bucket& bucket : cut(tensors, ranks.size(), bucket_bytes, columns_of)) {
    const at::Tensor own =
        sum_of_row(packed_for(bucket, ranks.size(), ranks), ranks, fixed).to(bucket.front().flat.device());
    int64_t at = 0;
    for (const Columns& columns : bucket) {
      const at::Tensor row = columns.in_row(ranks.rank());
      row.copy_(own.narrow(0, at, row.numel()));
      at += columns.count;
    }
  }
  for (const at::Tensor& tensor : tensors) {
    const ElementShare share = share_of(tensor.numel(), &ranks, fixed);
    const int64_t end = share.begin + share.count;
    tensor.view(-1).narrow(0, 0, share.begin).zero_();
    tensor.view(-1).narrow(0, end, tensor.numel() - end).zero_();
  }
}

void all_gather_(const std::vector<at::Tensor>& tensors, Communicator& ranks, bool fixed,
                 int64_t bucket_bytes) {
  const auto columns_of = [&](int64_t numel) { return share_of(numel, &ranks, fixed).most; };
  for (const Bucket& bucket : cut(tensors, ranks.size(), bucket_bytes, columns_of)) {
    const int64_t width = width_of(bucket);
    const at::Tensor& first = bucket.front().flat;
    at::Tensor own = at::zeros({width}, first.options());
    int64_t at = 0;
    for (const Columns& columns : bucket) {
      const at::Tensor row = columns.in_row(ranks.rank());
      own.narrow(0, at, row.numel()).copy_(row);
      at += columns.count;
    }
    own = own.to(buffer_device(own, ranks));
    const at::Tensor all = at::empty({ranks.size(), width}, own.options());
    ranks.run({.kind = Collective::Kind::kAllGather,
               .send = own.data_ptr(),
               .receive = all.data_ptr(),
               .count = width * static_cast<int64_t>(own.element_size()),
               .on_device = own.is_cuda()});
    exchange(bucket, all.to(first.device()), false);
  }
}

at::Tensor all_gather(const at::Tensor& own, int64_t num_elements, Communicator& ranks, bool fixed) {
  const ElementShare share = share_of(num_elements, &ranks, fixed);
  BOUGH_CHECK(own.dim() == 1 && own.size(0) == share.count, "got a shard of shape ", own.sizes(),
              ", expected ", share.count, " of ", num_elements, " elements");
  const at::Tensor all = at::empty({num_elements}, own.options().device(buffer_device(own, ranks)));
  all.narrow(0, share.begin, share.count).copy_(own);
  all_gather_({all}, ranks, fixed);
  return all;
}

}  // namespace bough
