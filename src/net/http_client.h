// Makes HTTP calls, each on a connection of its own. Rewards, environments and engines that run as HTTP
// servers (endpoints) are called with it. Only wait_for_endpoint blocks.
//
// Redirects are not followed. https is not supported; for https, use a proxy on this machine.
#pragma once

#include <sys/socket.h>

#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <optional>
#include <string>
#include <utility>

#include "net/line_splitter.h"

namespace bough {

struct HttpUrl {
  std::string host;       // a name or an address; IPv6 without brackets
  std::string port;       // digits
  std::string target;     // path and query, begins with '/'
  std::string authority;  // host and port as written in the URL
};
// Throws UserError if the URL is not http://HOST[:PORT][/PATH]. The message begins with `setting`.
HttpUrl parse_http_url(const std::string& url, const std::string& setting = "reward");

// Returns the API key: the first line of `file`, or the environment variable `variable` if `file` is empty.
// Returns "" if that variable is not set. Throws UserError if the file's first line is empty. The message
// begins with `setting`.
std::string load_api_key(const char* variable, const std::string& setting, const std::string& file);

struct HttpAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
};

// Blocks until one of the host's addresses accepts a connection. Closes this connection and returns the
// address. Messages begin with `what` ("reward http://..."). Throws UserError if the host does not exist, and
// IoError if no connection succeeds within limit_seconds. `setting` is the name of the setting for this
// limit.
HttpAddress wait_for_endpoint(const std::string& what, const HttpUrl& url, double limit_seconds,
                              const std::string& setting);

struct HttpAnswer {
  enum Kind {
    kAnswered,      // with status, reason and body
    kNotConnected,  // nothing was sent
    kLost,          // the connection broke before the answer was complete
    kMalformed,     // the answer is not valid HTTP, or is too long
  } kind = kAnswered;
  unsigned status = 0;
  std::string reason, body;
  std::string message;  // what went wrong; "" for status 2xx

  bool is_success() const { return kind == kAnswered && status >= 200 && status < 300; }
  // Whether the endpoint may succeed at another attempt.
  bool is_transient() const { return kind == kAnswered && (status >= 500 || status == 429 || status == 408); }
};

// A connection on which nothing is sent. If the process at its other end ends, the connection is closed, even
// if another process gets the address.
class IdleConnection {
 public:
  explicit IdleConnection(const HttpAddress& address);  // does not block
  ~IdleConnection();
  IdleConnection(const IdleConnection&) = delete;
  IdleConnection& operator=(const IdleConnection&) = delete;
  bool is_open() const;  // or is still connecting

 private:
  const int descriptor_;  // -1: could not be opened
};

// Makes one call at a time. Does not block.
class HttpCall {
 public:
  // bearer: token for the header "Authorization: Bearer"; empty: no header. An answer of more than max_bytes
  // counts as malformed. The bytes that take_body() returned are included.
  HttpCall(HttpUrl url, const HttpAddress& address, std::string bearer = "",
           uint64_t max_bytes = kMaxReplyBytes)
      : url_(std::move(url)), address_(address), bearer_(std::move(bearer)), max_bytes_(max_bytes) {}
  ~HttpCall() { hang_up(); }
  HttpCall(const HttpCall&) = delete;
  HttpCall& operator=(const HttpCall&) = delete;

  void post(const std::string& json) { begin("POST", url_.target, json); }
  // `json` empty: no body.
  void begin(const std::string& method, const std::string& target, const std::string& json);
  void hang_up();
  int descriptor() const { return descriptor_; }  // for poll(); -1 if there is no open connection
  bool wants_to_send() const { return descriptor_ >= 0 && !outgoing_.empty(); }
  bool has_failed() const { return error_ != 0; }  // true: the next advance() returns the failure
  // Sends and receives without blocking. Returns the answer if it is complete; nullopt if it is incomplete or
  // no call is in progress.
  std::optional<HttpAnswer> advance();
  // For streams of events: returns the part of the body that has arrived and was not returned before, if the
  // status is 2xx. The answer of advance() then has only the remaining part.
  std::string take_body();

 private:
  void expect_response();
  void send_what_fits();
  boost::system::error_code parse();

  const HttpUrl url_;
  const HttpAddress address_;
  const std::string bearer_;
  const uint64_t max_bytes_;
  int descriptor_ = -1;
  int error_ = 0;  // errno of the connection; 0: none
  bool is_connected_ = false;
  std::string outgoing_, incoming_;
  std::optional<boost::beast::http::response_parser<boost::beast::http::string_body>> parser_;
};

}  // namespace bough
