#include "data/rollout_file.h"

#include <zstd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/file.h"

namespace bough {

namespace {

// Decompressed bytes per piece: large enough to make system calls cheap, small enough to parse the text while
// it is in the CPU cache.
constexpr size_t kChunk = size_t{1} << 20;

bool is_compressed(const std::filesystem::path& path) {
  return path.extension() == ".zst";
}

// The lines of a file or a part of it, decompressed while reading. Memory holds a piece and at most the
// longest line.
class LineSource {
 public:
  // `bytes`: of the file at `path`; they must outlive this object.
  LineSource(const std::filesystem::path& path, std::span<const std::byte> bytes)
      : path_(path), bytes_(bytes) {
    if (!is_compressed(path)) return;
    stream_.reset(ZSTD_createDStream());
    BOUGH_CHECK(stream_ != nullptr, "ZSTD_createDStream failed");
    compressed_ = {bytes.data(), bytes.size(), 0};
  }

  // Sets `line` to the next line without its line break. It is valid until the next call. Returns false after
  // the last line.
  bool next(std::string_view& line) {
    if (!stream_) return cut({reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}, line);
    size_t searched = begin_;
    while (true) {
      const size_t stop = buffer_.find('\n', searched);
      if (stop != std::string::npos || finished_) return cut(buffer_, line);
      searched = buffer_.size() - begin_;
      buffer_.erase(0, begin_);
      begin_ = 0;
      decompress();
    }
  }

 private:
  bool cut(std::string_view text, std::string_view& line) {
    if (begin_ >= text.size()) return false;
    const size_t stop = std::min(text.find('\n', begin_), text.size());
    line = text.substr(begin_, stop - begin_);
    begin_ = stop + 1;
    return true;
  }

  void decompress() {
    const size_t old_size = buffer_.size();
    buffer_.resize(old_size + kChunk);
    ZSTD_outBuffer out{buffer_.data() + old_size, kChunk, 0};
    while (out.pos == 0 && !finished_) {
      // A zstd file consists of one or more frames. It is complete only if it ends at the end of a frame.
      if (compressed_.pos == compressed_.size && frame_ended_) {
        finished_ = true;
        break;
      }
      const size_t left = ZSTD_decompressStream(stream_.get(), &out, &compressed_);
      if (ZSTD_isError(left))
        throw UserError(str(path_.string(), ": the zstd file is damaged: ", ZSTD_getErrorName(left),
                            " near byte ", compressed_.pos, " of ", compressed_.size, "; write it again"));
      frame_ended_ = left == 0;
      if (out.pos == 0 && compressed_.pos == compressed_.size && !frame_ended_)
        throw UserError(str(path_.string(), ": the zstd file is cut off after ", compressed_.size,
                            " bytes, in the middle of a frame; write it again"));
    }
    buffer_.resize(old_size + out.pos);
  }

  struct FreeStream {
    void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
  };

  std::filesystem::path path_;
  std::span<const std::byte> bytes_;
  // nullptr for plain text, which is read without decompression
  std::unique_ptr<ZSTD_DStream, FreeStream> stream_;
  ZSTD_inBuffer compressed_{};
  std::string buffer_;  // decompressed text; bytes before begin_ were already returned
  size_t begin_ = 0;
  bool frame_ended_ = false;
  bool finished_ = false;
};

// Compresses text to zstd frames, each with a checksum.
class Compressor {
 public:
  using Output = std::function<void(const char* data, size_t num_bytes)>;

  explicit Compressor(Output output) : output_(std::move(output)), context_(ZSTD_createCCtx()) {
    BOUGH_CHECK(context_ != nullptr, "ZSTD_createCCtx failed");
    check(ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_checksumFlag, 1));
    out_.resize(ZSTD_CStreamOutSize());
  }
  void write(std::string_view text) { compress(text, ZSTD_e_continue); }
  void end_frame() { compress({}, ZSTD_e_end); }

 private:
  static size_t check(size_t result) {
    BOUGH_CHECK(!ZSTD_isError(result), "zstd: ", ZSTD_getErrorName(result));
    return result;
  }
  void compress(std::string_view text, ZSTD_EndDirective directive) {
    ZSTD_inBuffer in{text.data(), text.size(), 0};
    bool done = false;
    while (!done) {
      ZSTD_outBuffer out{out_.data(), out_.size(), 0};
      const size_t left = check(ZSTD_compressStream2(context_.get(), &out, &in, directive));
      output_(out_.data(), out.pos);
      done = directive == ZSTD_e_end ? left == 0 : in.pos == in.size;
    }
  }

  struct FreeContext {
    void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
  };

  Output output_;
  std::unique_ptr<ZSTD_CCtx, FreeContext> context_;
  std::string out_;
};

// Writes text to a file, compressed if the file name says so.
class LineSink {
 public:
  explicit LineSink(const std::filesystem::path& path) : file_(path) {
    if (is_compressed(path))
      compressor_.emplace([this](const char* data, size_t num_bytes) { file_.write(data, num_bytes); });
  }
  void write(std::string_view text) { compressor_ ? compressor_->write(text) : file_.write(text); }
  void end_frame() {
    if (compressor_) compressor_->end_frame();
  }
  void commit() {
    end_frame();
    file_.commit();
  }

 private:
  AtomicFile file_;
  std::optional<Compressor> compressor_;  // nullopt for plain text
};

// The lines that are not blank, as rollouts. `file`: its name, for messages.
std::vector<Trajectory> parse_lines(LineSource source, const std::string& file,
                                    const RolloutReadOptions& options) {
  std::vector<Trajectory> rollouts;
  std::string_view line;
  int64_t first_line = 0;
  for (int64_t number = 1; source.next(line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string where = str(file, ", line ", number);
    rollouts.push_back(parse_rollout_line(line, where, options));
    if (rollouts.size() == 1) first_line = number;
    if (rollouts.back().temperature != rollouts.front().temperature)
      throw UserError(str(where, ", field 'temperature': got ", rollouts.back().temperature, "; expected ",
                          rollouts.front().temperature, " as in line ", first_line,
                          " (default 1): all rollouts of a batch need the same temperature; split the file"));
  }
  if (rollouts.empty())
    throw UserError(str(file, ": got no rollouts; expected JSON Lines, one sequence per line"));
  return rollouts;
}

}  // namespace

std::vector<Trajectory> read_rollouts(const std::filesystem::path& path, const RolloutReadOptions& options) {
  const MappedFile file(path);
  return parse_lines({path, file.bytes()}, path.string(), options);
}

void write_rollouts(const std::filesystem::path& path, const std::vector<Trajectory>& rollouts) {
  LineSink sink(path);
  std::string text;
  for (size_t i = 0; i < rollouts.size(); ++i) {
    const bool begins_group = i > 0 && rollouts[i].group != rollouts[i - 1].group;
    if (begins_group || text.size() >= kChunk) {
      sink.write(text);
      text.clear();
    }
    if (begins_group) sink.end_frame();
    append_rollout_line(text, rollouts[i]);
    text += '\n';
  }
  sink.write(text);
  sink.commit();
}

std::string rollouts_frame(std::span<const Trajectory> rollouts) {
  std::string text, out;
  for (const Trajectory& rollout : rollouts) {
    append_rollout_line(text, rollout);
    text += '\n';
  }
  Compressor compressor([&](const char* data, size_t num_bytes) { out.append(data, num_bytes); });
  compressor.write(text);
  compressor.end_frame();
  return out;
}

RolloutGroups::RolloutGroups(const std::filesystem::path& path, RolloutReadOptions options)
    : path_(path), options_(std::move(options)), file_(path) {
  for (size_t begin = 0; begin < file_.size();) {
    const size_t size = ZSTD_findFrameCompressedSize(file_.data() + begin, file_.size() - begin);
    if (ZSTD_isError(size)) break;
    frames_.push_back(file_.bytes().subspan(begin, size));
    begin += size;
  }
  if (frames_.size() > 1) return;
  const std::span<const std::byte> bytes = frames_.empty() ? file_.bytes() : frames_[0];
  frames_.clear();
  for (Trajectory& row : parse_lines({path_, bytes}, path_.string(), options_)) {
    if (groups_.empty() || groups_.back().back().group != row.group) groups_.emplace_back();
    groups_.back().push_back(std::move(row));
  }
}

std::vector<Trajectory> RolloutGroups::read(size_t i) const {
  BOUGH_CHECK(i < size(), "group ", i, " of ", size());
  if (frames_.empty()) return groups_[i];
  return parse_lines({path_, frames_[i]}, str(path_.string(), ", group ", i + 1), options_);
}

Json rollout_to_json(const Trajectory& rollout) {
  std::string text;
  append_rollout_line(text, rollout);
  return Json::parse(text);
}

Trajectory parse_rollout(const Json& line, const std::string& where, const RolloutReadOptions& options) {
  return parse_rollout_line(dump_line(line), where, options);
}

}  // namespace bough
