"""``make test`` runs a sample of the cases of each test, the same ones each time."""

from tests.support.sampling import sample

MANY = [f"tests/test_a.py::test_many[{k}]" for k in range(40)]
FEW = [f"tests/test_a.py::test_few[{k}]" for k in range(3)]


def test_sample() -> None:
    chosen = sample([*MANY, *FEW, "tests/test_a.py::test_one"], 4)

    assert len(chosen.intersection(MANY)) == 10
    assert len(chosen.intersection(FEW)) == 2
    assert "tests/test_a.py::test_one" in chosen
    assert sample(reversed(MANY), 4) == chosen.intersection(MANY)
    assert len(sample(FEW, 4, least=1)) == 1


def test_all_cases() -> None:
    assert sample(MANY, 1) == {*MANY}
