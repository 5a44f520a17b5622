"""Chat templates that try to escape their sandbox, or to use up memory or time."""

BIG = (
    "{% set x = namespace(t='0123456789abcdef') %}{% for i in range(19) %}{% set x.t = x.t + x.t %}"
)
BIG += "{% endfor %}"  # a text of 8 million characters
NESTED = "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
NESTED += "{% set n.b = [n.b, n.b] %}{% endfor %}"  # two lists of 2**60 items
LONG = "{% set l = namespace(a=[0]) %}{% for i in range(17) %}{% set l.a = l.a + l.a %}{% endfor %}"
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}"
END = "{% endfor %}{% endfor %}"

HOSTILE = {
    "multiplied when compiled": "{{ 'a' * 10**9 }}",
    "multiplied text": "{{ 'a' * 1000000000 }}",
    "multiplied by a text": "{{ 1000000000 * 'a' }}",
    "multiplied list": "{{ [1] * 1000000000 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "power of a variable": "{% set x = 9 %}{{ x ** x ** x }}",
    "large product": "{% set n = namespace(a=3) %}{% for i in range(99999) %}"
    "{% set n.a = n.a * n.a %}{% endfor %}",
    "doubling by +": "{% set x = namespace(t='a') %}{% for i in range(99) %}"
    "{% set x.t = x.t + x.t %}{% endfor %}",
    "doubling by ~": "{% set x = namespace(t='a') %}{% for i in range(99) %}"
    "{% set x.t = x.t ~ x.t %}{% endfor %}",
    "doubling by join": "{% set x = namespace(t='a') %}{% for i in range(99) %}"
    "{% set x.t = [x.t, x.t] | join %}{% endfor %}",
    "doubling by replace": "{% set x = namespace(t='aa') %}{% for i in range(99) %}"
    "{% set x.t = x.t.replace('a', 'aa') %}{% endfor %}",
    "doubling by the filter replace": "{% set x = namespace(t='aa') %}{% for i in range(99) %}"
    "{% set x.t = x.t | replace('a', 'aa') %}{% endfor %}",
    "doubling by replacing nothing": "{% set x = namespace(t='aa') %}{% for i in range(99) %}"
    "{% set x.t = x.t.replace('', 'aa') %}{% endfor %}",
    "doubling by a block": "{% set x = namespace(t='a') %}{% for i in range(99) %}"
    "{% set t %}{{ x.t }}{{ x.t }}{% endset %}{% set x.t = t %}{% endfor %}",
    "doubling by a macro": "{% macro m(t) %}{{ t }}{{ t }}{% endmacro %}"
    "{% set x = namespace(t='a') %}{% for i in range(99) %}{% set x.t = m(x.t) %}{% endfor %}",
    "doubling a list": "{% set x = namespace(t=[0]) %}{% for i in range(99) %}"
    "{% set x.t = x.t + x.t %}{% endfor %}",
    "width of %": "{{ '%1000000000d' % 1 }}",
    "width of % by *": "{{ '%*d' % (1000000000, 1) }}",
    "width of % with a key": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "width of % with a nested key": "{{ '%((a))1000000000d' % {'(a)': 1} }}",
    "precision of %": "{{ '%.1000000000f' % 1 }}",
    "width of the filter format": "{{ '%1000000000d' | format(1) }}",
    "width in a test": "{{ '%1000000000d' is divisibleby 3 }}",
    "width of str.format": "{{ '{:1000000000}'.format(1) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "attribute by str.format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "width of a date": "{{ strftime_now('%1000000000Y') }}",
    "center": "{{ 'a'.center(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "indent": "{{ 'a\nb' | indent(1000000000) }}",
    "indent by a text": BIG + "{{ 'a\nb\nc' | indent(x.t) }}",
    "indent of tojson": "{{ [1, 2] | tojson(indent=100000000) }}",
    "separators of tojson": BIG + "{{ [1, 2, 3, 4] | tojson(separators=(x.t, x.t)) }}",
    "nested ranges": FOREVER + "{{ i }}" + END,
    "loops without output": FOREVER + END,
    "a loop with a condition": "{% for i in range(99999) %}"
    "{% for j in range(99999) if j > 100000 %}{% endfor %}{% endfor %}",
    "chained filters": "{% for i in range(99999) %}{{ range(99999) "
    + "| select('odd') " * 50
    + "| list | length }}{% endfor %}",
    "range": "{{ range(10**12) | list }}",
    "long range": "{{ range(1000000000000) | list }}",
    "recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "two recursive macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "writing a nested list": NESTED + "{{ n.a }}",
    "JSON of a nested list": NESTED + "{{ n.a | tojson }}",
    "comparing nested lists": NESTED + "{{ n.a == n.b }}",
    "a nested list in a list": NESTED + "{{ n.a in [n.b] }}",
    "testing nested lists": NESTED + "{{ n.a is eq n.b }}",
    "selecting by nested lists": NESTED + "{{ [n.a] | select('==', n.b) | list | length }}",
    "sorting nested lists": NESTED + "{{ [n.a, n.b] | sort | length }}",
    "index of a nested list": NESTED + "{{ [n.a].index(n.b) }}",
    "joining a nested list": NESTED + "{{ [n.a] | join }}",
    "formatting a nested list": NESTED + "{{ '%s' % (n.a,) }}",
    "hashing a nested tuple": "{% set n = namespace(a=(1,)) %}{% for i in range(60) %}"
    "{% set n.a = (n.a, n.a) %}{% endfor %}{{ {n.a: 1} }}",
    "sorting in loops": LONG + FOREVER + "{% set y = l.a | sort %}" + END,
    "sorting long texts": BIG
    + "{% set y = [x.t + 'a', x.t + 'b'] * 9999 %}{{ y | sort | length }}",
    "many large texts": BIG + "{% set y = namespace(a=[]) %}{% for i in range(9999) %}"
    "{% set y.a = y.a + [x.t + 'a'] %}{% endfor %}",
    "many slices": BIG + "{% set y = namespace(a=[]) %}{% for i in range(9999) %}"
    "{% set y.a = y.a + [x.t[:8000000 + i]] %}{% endfor %}",
    "many long lists": LONG + "{% set y = namespace(a=[]) %}{% for i in range(9999) %}"
    "{% set y.a = [y.a, l.a[1:]] %}{% endfor %}",
    "a list of characters": BIG + "{{ x.t | list | length }}",
    "splitting into characters": BIG + "{{ x.t.split('0') | length }}",
    "splitting into lines": BIG + "{{ x.t.replace('0', '\n').splitlines() | length }}",
    "a search from the end": BIG + "{{ x.t.rfind('b' ~ x.t[:4000000]) }}",
    "stripping many characters": BIG + "{{ x.t.strip(x.t) | length }}",
    "long searches": BIG + "{% for i in range(99999) %}{{ '#' in x.t }}{% endfor %}",
    "many searches at once": BIG + "{{ [" + "'#' in x.t, " * 5000 + "] }}",
    "many comparisons at once": BIG + "{% set y = x.t[:-1] + 'f' %}{{ ["
    + "y == x.t, " * 5000 + "] }}",
    "changing case in loops": BIG + "{% for i in range(99999) %}{% set y = x.t | title %}"
    "{% endfor %}",
    "a number of many digits": BIG + "{{ x.t | int(base=16) * 2 }}",
    "long literals": "{% set y = namespace(a=[]) %}{% for i in range(99999) %}{% set y.a = [y.a, ["
    + "i, " * 9999 + "]] %}{% endfor %}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by the filter attr": "{{ '' | attr('__class__') }}",
    "class by an item": "{{ ''['__class__'] }}",
    "class by map": "{{ [''] | map(attribute='__class__.__mro__') | list }}",
    "class of a namespace": "{% set n = namespace() %}{% set n.__class__ = 1 %}{{ n }}",
    "functions of a macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "functions of globals": "{{ range.__globals__ ~ raise_exception.__globals__ }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "cycler": "{{ cycler('a').next.__globals__ }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "extends": "{% extends '/etc/passwd' %}",
    "the environment": "{{ self._TemplateReference__context.environment }}",
    "nested parentheses": "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    "nested loops": "{% for i in range(9) %}" * 100 + "{% endfor %}" * 100,
    "nested conditions": "{% if messages %}" * 150 + "x" + "{% endif %}" * 150,
    "a long template": "{{ a }}" * 100_000,
    "no template": "{% for %}",
    "an unknown block": "{% sql %}",
}  # fmt: skip
