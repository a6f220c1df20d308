// HTTP calls, each on a connection of its own. Rewards, environments and engines behind endpoints use them.
// Only wait_for_endpoint blocks.
//
// Redirects are not followed. https is not supported. Use a proxy on this machine for it.
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
  std::string authority;  // host and port as the URL has them
};
// Throws UserError if the URL is not http://HOST[:PORT][/PATH]. The message begins with `setting`.
HttpUrl parse_http_url(const std::string& url, const std::string& setting = "reward");

// Returns the API key: the first line of `file`, or the environment variable `variable` if `file` is empty.
// "" if there is none. Throws UserError, which begins with `setting`, if the file's first line is empty.
std::string load_api_key(const char* variable, const std::string& setting, const std::string& file);

struct HttpAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
};

// Blocks until one of the host's addresses accepts a connection, which is closed again. Returns that address.
// `what` begins messages ("reward http://..."). Throws UserError if the host does not exist, and IoError if
// there is no connection within limit_seconds. `setting` is the name of the limit.
HttpAddress wait_for_endpoint(const std::string& what, const HttpUrl& url, double limit_seconds,
                              const std::string& setting);

struct HttpAnswer {
  enum Kind {
    kAnswered,      // with status, reason and body
    kNotConnected,  // nothing was sent
    kLost,          // the connection broke before the answer was complete
    kMalformed,     // the answer is no HTTP or is too long
  } kind = kAnswered;
  unsigned status = 0;
  std::string reason, body;
  std::string message;  // what went wrong; "" for status 2xx

  bool is_success() const { return kind == kAnswered && status >= 200 && status < 300; }
  // Whether the endpoint may succeed at another attempt.
  bool is_transient() const { return kind == kAnswered && (status >= 500 || status == 429 || status == 408); }
};

// Makes one call at a time. Does not block.
class HttpCall {
 public:
  // bearer: token for the header "Authorization: Bearer"; empty: no header. An answer is malformed if it has
  // more than max_bytes, including the bytes that take_body returned.
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
  bool has_failed() const { return error_ != 0; }  // true: advance() returns the failure without a poll()
  // Sends and receives without blocking. Returns the answer if it is complete; nullopt if it is not, or if
  // there is no call.
  std::optional<HttpAnswer> advance();
  // For streams of events: returns and removes the part of the body that has arrived, if the status is 2xx.
  // The complete answer then has only the rest.
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
