// An HTTP/1.1 server for many slow and some adversarial clients. It trusts nothing that a client sends.
//
//   I/O thread            accepts, reads, parses HTTP, calls the handler, writes; never waits for a client
//   preparation threads   run the functions given to prepare(): one thread for short bodies and one for long
//                         bodies, so that a short prompt does not wait for a prompt of megabytes
//
// Limits (HttpLimits), and the answer if a client exceeds one:
//   header size 431, body size in any encoding 413, time for header or body 408,
//   number of connections 503, bytes of all bodies together 503,
//   unread bytes of an answer, or time without reading: the connection is closed.
// After an answer that ends a connection, the server discards further input for a short time. Otherwise the
// client could lose the answer. A client that closes its sending side before its answer is complete counts as
// gone.
#pragma once

#include <atomic>
#include <functional>
#include <istream>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/settings.h"

namespace bough {

// Limits for clients. Times are in seconds.
struct HttpLimits {
  int64_t max_connections = 1024;
  Bytes max_body = {int64_t{16} << 20};
  Bytes max_header = {int64_t{32} << 10};
  Bytes max_buffered = {int64_t{256} << 20};
  // Unread bytes of a stream.
  Bytes max_unsent = {int64_t{4} << 20};
  double header_timeout_seconds = 10;
  double body_timeout_seconds = 60;
  double idle_timeout_seconds = 75;
  double write_timeout_seconds = 30;

  template <class V>
  void visit(V& v) {
    v("max_connections", max_connections, "open connections; further ones get the answer 503",
      range(1, 1000000));
    v("max_body", max_body, "largest body of a request, in any encoding; a larger one gets the answer 413");
    v("max_buffered", max_buffered,
      "bytes of all bodies that are being read; a request beyond them gets the answer 503");
    v("max_header", max_header, "largest header of a request; a larger one gets the answer 431");
    v("max_unsent", max_unsent,
      "unread bytes of a stream beyond which a client that does not read is disconnected");
    v("header_timeout_seconds", header_timeout_seconds, "seconds until a request's header must be complete",
      range(0.01, 86400.0));
    v("body_timeout_seconds", body_timeout_seconds, "seconds until a request's body must be complete",
      range(0.01, 86400.0));
    v("idle_timeout_seconds", idle_timeout_seconds,
      "seconds after which a connection without a request is closed", range(0.01, 86400.0));
    v("write_timeout_seconds", write_timeout_seconds,
      "seconds after which a client that reads nothing of its answer is disconnected", range(0.01, 86400.0));
  }
  void check() const {
    for (const Bytes& bytes : {max_body, max_buffered, max_header, max_unsent})
      if (bytes.count < 1024)
        throw UserError(
            "http: max_body, max_buffered, max_header and max_unsent need at least 1 KiB each, not auto");
  }
};

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;  // requests: names in lower case

struct HttpRequest {
  std::string method;
  std::string path;   // without the query
  HttpHeaders query;  // names and values after '?', with %XX and '+' decoded
  HttpHeaders headers;
  std::string body;
  std::shared_ptr<void> hold;  // the body counts towards http.max_buffered while this object lives

  // The value of the first header with this lower-case name, or "".
  std::string header(std::string_view name) const;
};

// "a=b&c" as names and values. An incomplete %XX stays as it is.
HttpHeaders parse_query(std::string_view query);

struct HttpResponse {
  int status = 200;
  std::string body;
  std::string content_type = "application/json";
  HttpHeaders headers;
  bool close = false;  // ends the connection after the answer
  // If set, the next `stream_bytes` bytes of the stream are the body instead. They are read while the answer
  // is sent, on the I/O thread, so the stream must be a local file or memory.
  std::shared_ptr<std::istream> stream;
  int64_t stream_bytes = 0;
};

// Sends the answer to one request: either respond(), or begin_stream(), any number of write(), finish(). Use
// it on the I/O thread only. Output for a client that has gone is dropped. The exchange refers to the
// server's connection, so it must not outlive the server.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;
  virtual void respond(HttpResponse response) = 0;
  virtual void begin_stream(const HttpHeaders& headers) = 0;  // 200, text/event-stream
  virtual void write(std::string_view text) = 0;
  virtual void finish() = 0;
  virtual bool is_open() const = 0;
  // `gone` is called once, on the I/O thread, if the client goes away before the answer is complete.
  virtual void on_gone(std::function<void()> gone) = 0;
};

struct HttpServerOptions {
  std::string host;
  int port = 0;
  HttpLimits limits;
  // Makes the body of the error answers that the server itself sends, in the format of the API that `path`
  // belongs to.
  std::function<std::string(int status, const std::string& message, const std::string& path)> error_body;
};

struct HttpStatistics {
  std::atomic<int64_t> connections = 0;  // open
  std::atomic<int64_t> accepted = 0, refused = 0;
  std::atomic<int64_t> gone = 0;       // clients that left before their answer was complete
  std::atomic<int64_t> cut_off = 0;    // part of `gone`: clients that did not read and were disconnected
  std::atomic<int64_t> malformed = 0;  // answered 400, 408, 413, 431 or 503 (max_buffered) without a handler
};

bool is_loopback(const std::string& host);  // throws UserError unless `host` is an IP address or localhost

// Whether the Host and Origin headers, if they are present, name this machine. A server that answers only
// such requests cannot be reached by pages of other sites: neither directly nor by a name that resolves to
// 127.0.0.1.
bool is_for_this_machine(const HttpRequest& request);

class HttpServer {
 public:
  // Called on the I/O thread; must not throw.
  using Handler = std::function<void(HttpRequest, std::shared_ptr<HttpExchange>)>;

  // The server listens when the constructor returns, and may call the handler from then on. Throws UserError
  // if the address cannot be used.
  HttpServer(HttpServerOptions options, Handler handler);
  ~HttpServer();  // close()
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const;
  std::string url() const;
  // Any thread may call post() and prepare(). post() runs `work` on the I/O thread. prepare() runs `work` on
  // the preparation thread for bodies of `bytes` bytes. `work` must not throw.
  void post(std::function<void()> work);
  void prepare(size_t bytes, std::function<void()> work);
  // Runs `work` on the I/O thread every `seconds` until close(), beside the work of other calls. `work` must
  // not throw.
  void every(double seconds, std::function<void()> work);
  void stop_accepting();
  // Drops functions that prepare() has queued, waits at most `seconds` for answers in progress, then closes
  // all connections and ends the threads.
  void close(double seconds = 1);
  const HttpStatistics& statistics() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bough
