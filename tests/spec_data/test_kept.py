"""Objects that a Python program hands over are there as long as a call has named them."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from spec_data.terminal import memory_models, memory_rows
from spec_data.terminal.kept import forgotten


class Model:
    def named_modules(self):
        return ()


class Tokenizer:
    def save_pretrained(self, folder):
        raise AssertionError(folder)


def test_two_models_of_a_class_are_two_targets():
    one, two = (Model(), Tokenizer()), (Model(), Tokenizer())
    with forgotten():
        first = memory_models.named("--target", one, True)
        with forgotten():
            second = memory_models.named("--target", two, True)
            assert memory_models.pair_of(first) == one and memory_models.pair_of(second) == two
        assert memory_models.pair_of(first) == one and memory_models.pair_of(second) is None
    assert memory_models.pair_of(first) is None


def test_a_call_that_ends_takes_nothing_from_another_thread():
    named, ended, rows = Barrier(2, timeout=20), Barrier(2, timeout=20), [{"text": "a"}]

    def short():
        with forgotten():
            name = memory_rows.named(rows)[0]
            named.wait()
        ended.wait()
        return name

    def long():
        with forgotten():
            name = memory_rows.named(rows)[0]
            named.wait()
            ended.wait()
            return name, memory_rows.lines_of(name)

    with ThreadPoolExecutor(2) as threads:
        other, found = threads.submit(short), threads.submit(long)
        name, lines = found.result(timeout=30)
    assert other.result() == name  # of equal rows
    assert lines == [b'{"text": "a"}'] and memory_rows.lines_of(name) is None
