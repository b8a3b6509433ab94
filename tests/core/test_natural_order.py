"""Order of names with numbers."""

from vitrail.core.natural_order import natural_key


def test_numbers_in_names_are_sorted_by_value():
    names = ["run 10", "run 9", "Run 2", "run 02", "10", "9", "b", "B2", "b10", "ViT-B/16", "ViT-B/8", ""]
    assert sorted(names, key=natural_key) == [
        *["", "9", "10", "b", "B2", "b10", "Run 2", "run 02", "run 9", "run 10", "ViT-B/8", "ViT-B/16"]
    ]


def test_order_is_total_for_long_and_other_digits():
    names = ["٣", "²", "1" * 5000, "1" * 4999 + "0", "a1", "A1", "a01"]
    backwards = names[::-1]
    assert sorted(names, key=natural_key) == sorted(backwards, key=natural_key)
    assert natural_key("1" * 4999 + "0") < natural_key("1" * 5000)
    assert len({natural_key(name) for name in names}) == len(names)
