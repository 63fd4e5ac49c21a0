import pytest

from tune_model.extract.algebra import polynomial, same, tidy


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("batch*sequence*4096", "(sequence * 4096) * batch"),
        ("2*(s + 1)", "s + s + 2"),
        ("(s*4096) // 128", "32*s"),
        ("(4*s + 8) // 4", "s + 2"),
        ("(s*8) % 4", 0),
        ("s - s", 0),
        ("cdiv(7, 2)", 4),
        ("max(s, 1) * 2", "2 * max(1, s)"),
        ("-(s - 3)", "3 - s"),
    ],
)
def test_equal_sizes_compare_equal(a, b):
    assert same(a, b)


@pytest.mark.parametrize(("a", "b"), [("s*t", "s*s"), ("s // 3", "s // 4"), ("s + 1", "s"), ("min(s, 4)", "max(s, 4)")])
def test_different_sizes_do_not(a, b):
    assert not same(a, b)


@pytest.mark.parametrize(
    ("a", "b", "quotient"),
    [
        ("b*s*4096", "s*64", "b*64"),
        ("s*32 + 64", "s + 2", 32),
        ("s*t + t", "t", "s + 1"),
        ("s*3", 2, None),
        ("s", "t", None),
        (0, "s", 0),
        ("s*s - 1", "s + 1", None),
    ],
)
def test_quotients_are_exact_or_absent(a, b, quotient):
    found = polynomial(a).over(polynomial(b))
    assert (None if found is None else found.dim) == quotient


@pytest.mark.parametrize(
    ("dim", "text"), [("4096*s*b", "b*s*4096"), ("1 + s", "s + 1"), ("s - 1", "s - 1"), ("0 - 2*s", "-s*2"), (7, 7)]
)
def test_texts_are_canonical(dim, text):
    assert tidy(dim) == text
    assert same(tidy(dim), dim)
