"""``make test`` runs a sample of the cases of each test, the same ones each time."""

from tests.support.sampling import sample

MANY = [f"tests/test_a.py::test_many[{k}]" for k in range(40)]
FEW = [f"tests/test_a.py::test_few[{k}]" for k in range(3)]


def test_sample() -> None:
    chosen = sample([*MANY, *FEW, "tests/test_a.py::test_one"], 4)

    assert len(chosen.intersection(MANY)) == 10
    assert chosen.issuperset([*FEW, "tests/test_a.py::test_one"])
    assert sample(reversed(MANY), 4) == chosen.intersection(MANY)


def test_all_cases() -> None:
    assert sample(MANY, 1) == {*MANY}
