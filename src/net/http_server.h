// An HTTP/1.1 server for many slow and some hostile clients: one thread does all input and output, two more
// take requests apart, and nothing of a client is trusted.
//
//   I/O thread    accepts, reads, parses HTTP, calls the handler, writes; never waits for a client
//   two lanes     a thread for short bodies and one for long ones: what prepare() is given; a prompt of
//                 megabytes does not stand before a short one
//
// Bounds, each with its answer: the header (431), the body whatever its encoding (413), the time that either
// takes (408), connections and all bodies together (503), bytes that a client does not read and the time that
// it does not read (cut off). Where an answer ends a connection the rest of what the client sends is thrown
// away for a moment, so that it can read the answer. A client that closes its sending side while its request
// is answered counts as gone.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/settings.h"

namespace bough {

// What one client may take of the server, and for how long.
struct HttpLimits {
  int64_t max_connections = 1024;
  Bytes max_body = {int64_t{16} << 20};
  Bytes max_header = {int64_t{32} << 10};
  Bytes max_buffered = {int64_t{256} << 20};
  // Of a stream that its client does not read.
  Bytes max_unsent = {int64_t{4} << 20};
  double header_timeout_seconds = 10;
  double body_timeout_seconds = 60;
  double idle_timeout_seconds = 75;
  double write_timeout_seconds = 30;

  template <class V>
  void visit(V& v) {
    v("max_connections", max_connections, "connections at once; more are answered 503", range(1, 1000000));
    v("max_body", max_body, "bytes of a request's body, whatever its encoding; more is answered 413");
    v("max_buffered", max_buffered, "bytes of all bodies that are being read; more is answered 503");
    v("max_header", max_header, "bytes of a request's header; more is answered 431");
    v("max_unsent", max_unsent,
      "bytes of a stream that wait for a client that does not read; with more it is cut off");
    v("header_timeout_seconds", header_timeout_seconds, "a request's header is complete within this time",
      range(0.01, 86400.0));
    v("body_timeout_seconds", body_timeout_seconds, "and its body within this", range(0.01, 86400.0));
    v("idle_timeout_seconds", idle_timeout_seconds, "a connection without a request is closed after this",
      range(0.01, 86400.0));
    v("write_timeout_seconds", write_timeout_seconds,
      "a client that takes nothing of an answer for this time is cut off", range(0.01, 86400.0));
  }
  void check() const {
    for (const Bytes& bytes : {max_body, max_buffered, max_header, max_unsent})
      if (bytes.count < 1024) throw UserError("http: a bound is below 1 KiB, or auto; give it in bytes");
  }
};

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;  // of requests: names in lower case

struct HttpRequest {
  std::string method;
  std::string path;  // without the query
  HttpHeaders headers;
  std::string body;
  std::shared_ptr<void> hold;  // counts the body among http.max_buffered while it lives

  // The first header of this name (in lower case), or "".
  std::string header(std::string_view name) const;
};

struct HttpResponse {
  int status = 200;
  std::string body;
  std::string content_type = "application/json";
  HttpHeaders headers;
  bool close = false;  // the connection ends with it
};

// The answer to one request: respond(), or begin_stream(), write() any number of times, finish(). On the I/O
// thread only. What is written after the client has gone is dropped. It holds the connection, so it must not
// outlive the server.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;
  virtual void respond(HttpResponse response) = 0;
  virtual void begin_stream(const HttpHeaders& headers) = 0;  // 200, text/event-stream
  virtual void write(std::string_view text) = 0;
  virtual void finish() = 0;
  virtual bool is_open() const = 0;
  // Called on the I/O thread, once, where the client goes away before the answer is complete.
  virtual void on_gone(std::function<void()> gone) = 0;
};

struct HttpServerOptions {
  std::string host;
  int port = 0;
  HttpLimits limits;
  // The body of an answer that the server gives by itself, in the shape that clients of `path` read.
  std::function<std::string(int status, const std::string& message, const std::string& path)> error_body;
};

struct HttpStatistics {
  std::atomic<int64_t> connections = 0;  // open
  std::atomic<int64_t> accepted = 0, refused = 0;
  std::atomic<int64_t> gone = 0;       // before their answer was complete
  std::atomic<int64_t> cut_off = 0;    // of these, because they did not read
  std::atomic<int64_t> malformed = 0;  // answered 400, 408, 413 or 431 without a handler
};

bool is_loopback(const std::string& host);  // UserError: no IP address, nor localhost

class HttpServer {
 public:
  // Called on the I/O thread; must not throw.
  using Handler = std::function<void(HttpRequest, std::shared_ptr<HttpExchange>)>;

  // Listens when it returns; the handler is called from then on. UserError: the address cannot be had.
  HttpServer(HttpServerOptions options, Handler handler);
  ~HttpServer();  // close()
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const;
  std::string url() const;
  // From any thread: on the I/O thread; on the lane for a body of so many bytes. Neither may throw.
  void post(std::function<void()> work);
  void prepare(size_t bytes, std::function<void()> work);
  // On the I/O thread, again and again, until close(). It may not throw.
  void every(double seconds, std::function<void()> work);
  void stop_accepting();
  // Writes out what is complete, for at most so long; then closes everything and ends the threads.
  void close(double seconds = 1);
  const HttpStatistics& statistics() const;

  struct State;  // of the source file

 private:
  std::unique_ptr<State> state_;
};

}  // namespace bough
