"""Chat templates from anyone: what they may do works as in Jinja, what grows without bounds is refused in time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onward.errors import ModelError
from onward.language.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi\nthere"}, {"role": "assistant", "content": "yo"}]

HARMLESS = [
    "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' + m['content'] }}{% if not loop.last %}, {% endif %}"
    "{{ loop.index0 }} of {{ loop.length }}{% endfor %}{% if add_generation_prompt %}{{ 'A:' }}{% endif %}",
    "{% set ns = namespace(x=[]) %}{% for m in messages if m.role == 'user' %}{% set ns.x = ns.x + [m.content] %}"
    "{% endfor %}{{ ns.x | join(', ') }}{{ messages | map(attribute='role') | join('-') }}",
    "{{ {'a': 1, 'b': [1, 2]} | tojson(indent=2) }}{{ 'abc' | center(9) }}{{ '%s-%d' | format('x', 3) }}",
    "{{ 'a b'.split(' ') | join('+') }}{{ '-'.join(['a', 'b']) }}{% set a, b = 1, 2 %}{{ a + b }}{{ 3 * 4 }}",
    "{% for k, v in {'q': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(3) }}",
    "{% set z %}block {{ messages | length }}{% endset %}{{ z }}{{ messages[1:] | length }}{{ 'x\ny' | indent(2) }}",
    "{{ 'hello' | replace('l', 'L') }}{{ [3, 1] | sort }}{{ ('a', 'b') }}{{ '{0}{0}'.format('x') }}{{ 'a' | upper }}",
    "{% for x in [[1, [2]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
    "{% for x in missing %}never{% else %}none{% endfor %}{{ 'a' in ('a', 'b') }}{{ 'abc' | truncate(2, true, '') }}",
]


@pytest.mark.parametrize("source", HARMLESS)
def test_a_template_writes_what_jinja_writes(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = lambda value, indent=None: json.dumps(value, indent=indent)
    expected = plain.from_string(source).render(messages=MESSAGES, add_generation_prompt=True)
    assert ChatTemplate(source, {}, Path("model")).render(MESSAGES) == expected


def _doubling(step: str, first: str = "'ab'") -> str:
    return (
        f"{{% set ns = namespace(x={first}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ ns.x }}}}"
    )


HOSTILE = {
    "tilde": _doubling("{% set ns.x = ns.x ~ ns.x %}"),
    "plus": _doubling("{% set ns.x = ns.x + ns.x %}"),
    "plus on lists": _doubling("{% set ns.x = ns.x + ns.x %}", "[1]"),
    "lists in lists": _doubling("{% set ns.x = [ns.x, ns.x] %}"),
    "tuples in tuples": _doubling("{% set ns.x = (ns.x, ns.x) %}") + "{{ ns.x == ns.x }}",
    "dicts in dicts": _doubling("{% set ns.x = {'a': ns.x, 'b': ns.x} %}") + "{{ ns.x | tojson }}",
    "dict()": _doubling("{% set ns.x = dict(a=ns.x, b=ns.x) %}"),
    "a block": _doubling("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "sum of lists": _doubling("{% set ns.x = [ns.x, ns.x] | sum(start=[]) %}", "[1]"),
    "format filter": "{{ '%999999999d' | format(3) }}",
    "format method": "{{ '{:>999999999}'.format(3) }}",
    "a field again and again": "{{ ('{0}' * 1000).format('a' * 1000000) }}",
    "percent": "{{ '%(a)s' * 1000 % {'a': 'x' * 1000000} }}",
    "indent": "{{ ('a\n' * 500000) | indent(1000000) }}",
    "indent with a text": "{{ ('a\n' * 500000) | indent('x' * 100000) }}",
    "slice": "{{ [1] | slice(999999999) | list }}",
    "batch": "{{ [1] | batch(999999999, 'x') | list }}",
    "tojson": "{{ [1, 2] | tojson(indent=999999999) }}",
    "center filter": "{{ 'a' | center(999999999) }}",
    "center by name": "{{ 'a' | center(width=999999999) }}",
    "center method": "{{ 'a'.center(999999999) }}",
    "center in map": "{{ ['a'] | map('center', 999999999) | list }}",
    "center of a block": "{% filter center(999999999) %}x{% endfilter %}",
    "zfill": "{{ 'a'.zfill(999999999) }}",
    "expandtabs": "{{ ('\t' * 1000).expandtabs(1000000) }}",
    "expandtabs by name": "{{ ('\t' * 1000).expandtabs(tabsize=1000000) }}",
    "replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "replace method": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "join filter": "{{ range(100000) | join('b' * 100000) }}",
    "join method": "{{ ('b' * 100000).join(range(100000) | map('string')) }}",
    "wordwrap": "{{ ('a ' * 500000) | wordwrap(1, true, 'x' * 100000) }}",
    "urlize": "{{ ('http://a.b ' * 90000) | urlize(target='x' * 100000) }}",
    "power": "{{ 2 ** 99999999 }}",
    "times": "{{ 'a' * 999999999 }}",
    "one text in a list many times": "{% set x = ['a' * 1000000] * 1000 %}{{ x }}",
    "one text in a list, as text": "{{ ['a' * 1000000] * 1000 | string }}",
    "lipsum": "{{ lipsum(100000) }}",
    "strftime": "{{ strftime_now('%999999999d') }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "slices": "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% if x[1:] == x %}{% endif %}{% endfor %}{% endfor %}",
    "a deep list": "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}",
}  # fmt: skip

# Each in a process with 4 GiB of addresses: a bound that does not hold fails here.
_RENDER = """
import json, sys, time, pathlib
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
except ImportError:
    pass
from onward.errors import ModelError
from onward.language import sandbox
from onward.language.chat import ChatTemplate
sandbox._SECONDS = 1.0
for name, source in json.load(sys.stdin).items():
    begun = time.process_time()
    try:
        ChatTemplate(source, {}, pathlib.Path("model")).render([{"role": "user", "content": "hi"}])
        result = "rendered"
    except ModelError as error:
        result = "MemoryError" if isinstance(error.__cause__, MemoryError) else "refused"
    print(json.dumps([name, result, time.process_time() - begun]), flush=True)
# not ru_maxrss, which begins with the memory of the process that started this one
lines = pathlib.Path("/proc/self/status").read_text().splitlines() if sys.platform == "linux" else []
print(json.dumps(["peak", next((int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM")), 0), 0]))
"""


def test_a_template_that_grows_without_bounds_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RENDER], input=json.dumps(HOSTILE), capture_output=True, text=True, check=True
    )
    *results, peak = [json.loads(line) for line in done.stdout.splitlines()]
    assert {name: result for name, result, _ in results} == dict.fromkeys(HOSTILE, "refused")
    assert {name for name, _, seconds in results if seconds > 10} == set()
    assert peak[1] < 256  # MiB


def test_a_variable_of_the_template_hides_no_bound() -> None:
    source = "{% set count_turns = 3 %}{% set join_texts = 3 %}{% set self = 'x' %}" + HOSTILE["tilde"]
    with pytest.raises(ModelError, match="characters"):
        ChatTemplate(source, {}, Path("model")).render(MESSAGES)


def test_each_rendering_has_its_own_bounds() -> None:
    template = ChatTemplate("{{ 'a' * 1000000 }}", {}, Path("model"))
    for _ in range(100):
        assert len(template.render(MESSAGES)) == 1_000_000
