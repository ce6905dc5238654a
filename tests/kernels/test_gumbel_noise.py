import torch

from kernels.reference.gumbel_noise import gumbel_noise, noise_key

WORD = 0xFFFFFFFF


def keys(*names: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor([noise_key(*name) for name in names], dtype=torch.int32)


def test_the_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel_noise(keys(*[(seed, 0, 17) for seed in range(8)]), 50_021).double().flatten()
    uniform = (-(-noise).exp()).exp()
    seen = torch.histc(uniform, bins=100, min=0, max=1)
    expected = uniform.numel() / 100
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    # 99 degrees of freedom: 5 standard deviations around the mean.
    assert abs(chi_square - 99) < 5 * (2 * 99) ** 0.5
    assert bool(noise.isfinite().all())


def test_noise_of_neighbouring_names_is_not_correlated() -> None:
    names = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32, 0, 0), (2**62, 7, 2**20)]
    noise = gumbel_noise(keys(*names), 20_011)
    correlation = torch.corrcoef(noise) - torch.eye(len(names))
    assert float(correlation.abs().max()) < 5 / 20_011**0.5
    shifted = torch.corrcoef(torch.stack((noise[0, :-1], noise[0, 1:])))[0, 1]
    assert abs(float(shifted)) < 5 / 20_011**0.5


def test_a_rows_noise_depends_on_its_key_alone() -> None:
    many = [(seed, seed % 3, seed * 5) for seed in range(9)]
    together = gumbel_noise(keys(*many), 1009)
    for i, name in enumerate(many):
        assert torch.equal(gumbel_noise(keys(name), 1009)[0], together[i])
        assert torch.equal(gumbel_noise(keys(name), 77)[0], together[i, :77])


def test_the_bits_are_those_of_unsigned_32_bit_arithmetic() -> None:
    name = (2**63 - 1, 5, 12345)
    a, b = (word & WORD for word in noise_key(*name))
    expected = []
    for token in (0, 1, 2, 1000, 49151):
        bits = (token * 0x9E3779B1 + a) & WORD
        bits = ((bits ^ bits >> 16) * 0x7FEB352D) & WORD
        bits ^= b
        bits = ((bits ^ bits >> 15) * 0x846CA68B) & WORD
        bits ^= bits >> 16
        uniform = torch.tensor(((bits & 0x7FFFFFFF) + 0.5) / 2**31, dtype=torch.float64)
        expected.append(-(-(-uniform).log1p()).log())
    noise = gumbel_noise(keys(name), 49152)[0, [0, 1, 2, 1000, 49151]]
    torch.testing.assert_close(noise.double(), torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_names_give_different_keys() -> None:
    names = [(s, c, p) for s in (0, 1, 2**32, 2**63 - 1) for c in range(8) for p in range(300)]
    assert len({noise_key(*name) for name in names}) == len(names)
