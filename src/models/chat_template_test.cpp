// What transformers makes of templates is compared in tests/parity/test_chat_template.py; here are the
// contract and the interpreter's corners.
#include "models/chat_template.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "models/chat_template_jinja.h"

namespace bough {
namespace {

std::string run(const std::string& source, const Json& variables = Json::object()) {
  return jinja::render(jinja::parse(source, "test"), variables, "test");
}

TEST(ChatTemplate, PlainChatMl) {
  const std::vector<Message> messages = {{"system", "S"}, {"user", "U\n"}};
  EXPECT_EQ(ChatTemplate().render(messages, true),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU\n<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(ChatTemplate().render(messages, false),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU\n<|im_end|>\n");
  EXPECT_EQ(ChatTemplate().default_system(), "");
}

TEST(ChatTemplate, DefaultSystemMessageIsFound) {
  const auto chat = ChatTemplate::from_text(
      "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}" +
          std::string(chatml_template()),
      "test");
  EXPECT_EQ(chat.default_system(), "Be kind.");
}

TEST(ChatTemplate, RefusesOtherTemplatesAndRoles) {
  EXPECT_THROW(ChatTemplate::from_text("{{ messages[0].content }}", "test"), UserError);
  EXPECT_THROW(ChatTemplate::from_directory("/no/such/directory"), UserError);
  EXPECT_THROW(ChatTemplate().render(std::vector<Message>{{"tool", ""}}, true), UserError);
}

TEST(Jinja, Expressions) {
  EXPECT_EQ(run("{{ 1 + 2 * 3 - -4 }}"), "11");
  EXPECT_EQ(run("{{ -7 // 2 }} {{ -7 % 3 }}"), "-4 2");
  EXPECT_EQ(run("{{ 'a' ~ 1 ~ true ~ none ~ missing }}"), "a1TrueNone");
  EXPECT_EQ(run("{{ not 1 == 2 and 'b' in 'abc' and 2 not in [1, 3] }}"), "True");
  EXPECT_EQ(run("{{ x[-1] }}{{ x[::-1][0] }}{{ x[1:]|length }}{{ x[:1]|first }}", {{"x", {1, 2, 3}}}),
            "3321");
  EXPECT_EQ(run("{{ 'x' if a is defined else 'y' }}{{ 'z' if false }}"), "y");
  EXPECT_EQ(run(R"({{ ' a '.strip() ~ 'xax'.lstrip('x') ~ 'a,b'.split(',')[1] ~ 'é|trim'|length }})"),
            "aaxb6");
  EXPECT_EQ(run("{{ a.b['c'] is string }}", {{"a", {{"b", {{"c", ""}}}}}}), "True");
  EXPECT_EQ(run(R"({{ "%}" ~ '}}' ~ "\n\"" }})"), "%}}}\n\"");
}

TEST(Jinja, LoopsHaveTheirOwnScopeNamespacesDoNot) {
  EXPECT_EQ(run("{% set y = 0 %}{% for i in x %}{% set y = i %}{{ y }}{% endfor %}{{ y }}", {{"x", {1, 2}}}),
            "120");
  EXPECT_EQ(run("{% set n = namespace(y=0) %}{% for i in x %}{% set n.y = n.y + i %}{% endfor %}{{ n.y }}",
                {{"x", {1, 2}}}),
            "3");
  EXPECT_EQ(
      run("{% for i in x %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }};{% endfor %}", {{"x", {5, 6}}}),
      "0TrueFalse;1FalseTrue;");
}

TEST(Jinja, WhiteSpaceControl) {
  EXPECT_EQ(run("a\n  {% if true %}\nb\n  {% endif %}\nc\n"), "a\nb\nc");
  EXPECT_EQ(run("a \n {%- if true -%} \n b {{- 'c' -}} \n d{% endif %}"), "abcd");
  EXPECT_EQ(run("  {{ 1 }}\n{# comment #}\n2"), "  1\n2");
  EXPECT_EQ(run("a\n  {%+ if true +%}\nb{% endif %}"), "a\n  \nb");
}

TEST(Jinja, ElseBranches) {
  const std::string source = "{% if x == 1 %}a{% elif x == 2 %}b{% elif x == 3 %}c{% else %}d{% endif %}";
  std::string all;
  for (int x = 1; x <= 4; ++x) all += run(source, {{"x", x}});
  EXPECT_EQ(all, "abcd");
}

TEST(Jinja, ErrorsAreUserErrors) {
  for (const char* source : {"{% if %}",
                             "{{ 1",
                             "{{ (1 }}",
                             "{% for x in y %}",
                             "{% endif %}",
                             "{% macro a() %}{% endmacro %}",
                             "{{ 'a' + 1 }}",
                             "{{ missing.member }}",
                             "{{ 'a'|upper }}",
                             "{{ f() }}",
                             "{{ 1 // 0 }}",
                             "{{ 'abc'[0] }}",
                             "{{ 1 < 2 < 3 }}",
                             "{{ raise_exception('no') }}",
                             "{% set 1 = 2 %}",
                             "{{ x is odd }}",
                             "{{ '\\q' }}",
                             "{{ 99999999999 }}",
                             "{% for a in 5 %}{% endfor %}",
                             "{% set x.y = 1 %}",
                             "{{ [1] }}",
                             "{{ 2 2 }}",
                             "{{ 2**3 }}"})
    EXPECT_THROW(run(source), UserError) << source;
}

TEST(Jinja, HostileTemplatesEnd) {
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += '(';
  EXPECT_THROW(run("{{ " + deep), UserError);
  std::string blocks, chain = "{% if x %}";
  for (int i = 0; i < 10'000; ++i) blocks += "{% if true %}", chain += "{% elif x %}";
  EXPECT_THROW(run(blocks), UserError);
  EXPECT_THROW(run(chain + "{% endif %}"), UserError);
  std::string loops, ends;
  for (int i = 0; i < 40; ++i) loops += "{% for a in x %}", ends += "{% endfor %}";
  EXPECT_THROW(run(loops + ends, {{"x", {1, 2, 3, 4}}}), UserError);
  std::string doubling = "{% set s = 'aaaaaaaa' %}";
  for (int i = 0; i < 40; ++i) doubling += "{% set s = s ~ s %}";
  EXPECT_THROW(run(doubling), UserError);
}

}  // namespace
}  // namespace bough
