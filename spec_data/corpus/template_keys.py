"""Which keys of messages a chat template reads.

A key that no template reads is lost without a trace, so the reader of rows names it. The answer is
taken from the parsed template: names that are looked up in `messages`, or in what is made of them.
It has too many names rather than too few.
"""

from collections.abc import Iterator, Mapping

from jinja2 import nodes
from transformers import PreTrainedTokenizerBase

from spec_data.corpus.facts import Layout, parse_columns
from spec_data.corpus.template import names_read, of_templates

_MESSAGES = "messages"
_WHOLE = {"tojson", "string", "list", "items", "dictsort", "pprint", "safe", "escape", "xmlattr"}
_BY_NAME = {"selectattr", "rejectattr", "map", "groupby", "sort", "unique", "sum", "join"}


def layout_of(
    tokenizer: PreTrainedTokenizerBase | None, given: str | Mapping[str, str] | None = None
) -> Layout:
    """Return how rows are read for a target, None: not known, with the columns of --columns.

    Raises:
        ConfigError: as `parse_columns`.
    """
    named = parse_columns(given)
    if tokenizer is None:
        return Layout(columns=named, keys=None)
    variables = names_read(tokenizer) or frozenset()
    return Layout(columns=named, keys=message_keys(tokenizer), variables=variables)


def message_keys(tokenizer: PreTrainedTokenizerBase) -> frozenset[str] | None:
    """Return the keys of messages that any of the tokenizer's chat templates reads.

    None: any may be read, because a template prints messages as a whole or cannot be read, or the
    tokenizer renders in Python code of its own.
    """
    found = of_templates(tokenizer, _keys)
    if found is None or any(keys is None for keys in found):
        return None
    return frozenset().union(*(keys or () for keys in found))


def _keys(tree: nodes.Template) -> set[str] | None:
    """Return the keys of messages that one template reads; None: any."""
    made = _made_of_messages(tree)
    whole, keys, printed = _single_messages(tree), set[str](), list[nodes.Node]()
    for node in tree.find_all(nodes.Getattr):
        keys |= {node.attr} if _roots(node) & made else set()
    for item in tree.find_all(nodes.Getitem):
        keys |= _texts(item.arg) if _roots(item) & made else set()
    for test in tree.find_all(nodes.Compare):
        if any(_roots(operand.expr) & made for operand in test.ops):
            keys |= _texts(test.expr)
    for call in tree.find_all(nodes.Call):
        if _roots(call.node) & made:
            keys |= {text for argument in call.args for text in _texts(argument)}
        function = call.node
        if isinstance(function, nodes.Getattr) and function.attr in ("items", "values"):
            printed.append(function.node)
    for filtered in tree.find_all(nodes.Filter):
        if filtered.node is None or not _roots(filtered.node) & made:
            continue
        if filtered.name in _BY_NAME:
            arguments = [*filtered.args, *(keyword.value for keyword in filtered.kwargs)]
            keys |= {text for argument in arguments for text in _texts(argument)}
        elif filtered.name in _WHOLE:
            printed.append(filtered.node)
    printed += (part for output in tree.find_all(nodes.Output) for part in output.nodes)
    return None if any(_is_message(part, whole) for part in printed) else keys


def _texts(node: nodes.Node) -> set[str]:
    """Return the texts that an expression holds."""
    constants = [node] if isinstance(node, nodes.Const) else list(node.find_all(nodes.Const))
    return {c.value for c in constants if isinstance(c.value, str)}


def _roots(node: nodes.Node) -> set[str]:
    """Return the names of the variables in an expression."""
    names = [node] if isinstance(node, nodes.Name) else list(node.find_all(nodes.Name))
    attributes = [f"{n.name}.{n.attr}" for n in node.find_all(nodes.NSRef)]
    return {n.name for n in names} | set(attributes)


def _targets(node: nodes.Node) -> Iterator[str]:
    """Yield the variables that a target of an assignment sets."""
    if isinstance(node, (nodes.Name, nodes.NSRef)):
        yield node.name
        return
    yield from (name.name for name in node.find_all(nodes.Name))
    yield from (reference.name for reference in node.find_all(nodes.NSRef))


def _made_of_messages(tree: nodes.Template) -> set[str]:
    """Return the variables that hold messages or parts of them, directly or by another variable."""
    made = {_MESSAGES}
    made |= {
        a.name
        for macro in tree.find_all(nodes.Macro)
        for a in macro.args
        if isinstance(a, nodes.Name)
    }
    while True:
        before = len(made)
        for loop in tree.find_all(nodes.For):
            if _roots(loop.iter) & made:
                made |= set(_targets(loop.target))
        for assigned in tree.find_all(nodes.Assign):
            if _roots(assigned.node) & made:
                made |= set(_targets(assigned.target))
        if len(made) == before:
            return made


def _single_messages(tree: nodes.Template) -> set[str]:
    """Return the variables that hold one whole message."""
    lists, single = {_MESSAGES}, set[str]()
    for assigned in tree.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name):
            if _is_list(assigned.node, lists):
                lists.add(assigned.target.name)
            elif isinstance(assigned.node, nodes.Getitem) and _is_list(assigned.node.node, lists):
                single.add(assigned.target.name)
    for loop in tree.find_all(nodes.For):
        if _is_list(loop.iter, lists) and isinstance(loop.target, nodes.Name):
            single.add(loop.target.name)
    return single


def _is_list(node: nodes.Node | None, lists: set[str]) -> bool:
    """Return whether an expression is a list of messages: a variable, a part or a filter of one."""
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_list(node.node, lists)
    if isinstance(node, nodes.Filter):
        return node.name not in ("first", "last", "map") and _is_list(node.node, lists)
    return isinstance(node, nodes.Name) and node.name in lists


def _is_message(node: nodes.Node, single: set[str]) -> bool:
    return isinstance(node, nodes.Name) and node.name in single | {_MESSAGES}
