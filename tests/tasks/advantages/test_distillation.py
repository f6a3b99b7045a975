import numpy as np

from cairn.tasks.advantages.step import distil, reverse_kl


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_token_that_the_teacher_finds_likelier_gains_and_one_that_it_would_not_say_loses() -> None:
    divergences = reverse_kl([floats(-1.0, -0.5), floats(-2.0)], [floats(-0.25, -3.0), floats(-2.0)])
    assert [values.tolist() for values in divergences] == [[-0.75, 2.5], [0.0]]
    found = distil([floats(0.5, 0.5), floats(-1.0)], divergences, [np.ones(2), np.ones(1)], coef=0.2)
    np.testing.assert_allclose(np.concatenate(found), [0.5 + 0.15, 0.5 - 0.5, -1.0], rtol=1e-6)
    assert {values.dtype for values in found} == {np.dtype(np.float32)}


def test_tokens_that_are_not_trained_on_keep_their_advantage() -> None:
    (found,) = distil([floats(0.0, 1.0, 0.0)], [floats(7.0, 1.0, 7.0)], [np.array([0, 1, 0], np.uint8)], coef=1.0)
    assert found.tolist() == [0.0, 0.0, 0.0]
