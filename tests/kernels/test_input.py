"""What the table of a bucket and the pointers to its tensors take and refuse; how sums are split among programs."""

import itertools
import math
import time
from collections import Counter

import pytest
import torch
from torch import Tensor

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.kernels.availability import MAX_RANK
from powersgd_triton.kernels.backproject import backproject_triton
from powersgd_triton.kernels.compensate_project import compensate_project_triton
from powersgd_triton.kernels.configurations import TABLES, architecture, select_configuration
from powersgd_triton.kernels.pack import pack_triton
from powersgd_triton.kernels.reconstruct import reconstruct_triton
from powersgd_triton.kernels.splits import busy_share, part_lengths, parts
from powersgd_triton.kernels.table import COPY_BLOCK, MAX_COLUMNS, POINTERS, BucketTable, Matrix, Pointers
from powersgd_triton.layout.layout import Layout
from powersgd_triton.planning import bucket_caps
from powersgd_triton.planning.models import MODELS, llama
from tests.support.kernel_cases import GRADIENTS, NAN, Bucket, assert_within, mixed, rounding, stored

CPU = torch.device("cpu")
TILES = (128, 32), (32, 64)


def table(*matrices: Matrix, bypass: list[tuple[int, int]] | None = None, device: torch.device = CPU) -> BucketTable:
    """Bypass tensors lie at the same offsets in both messages."""
    places = [(numel, offset, offset) for numel, offset in bypass or []]
    return BucketTable(matrices, places, *TILES, device)


def zeros(*sizes: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(size, device=device, dtype=dtype) for size in sizes]


SMALL = Matrix(6, 4, 2, 0, 0, 1), Matrix(3, 5, 1, 12, 8, 2)


@pytest.mark.parametrize(("n", "m"), [(2**31, 2), (1, MAX_COLUMNS + 1)])
def test_sizes_out_of_range_are_refused(n: int, m: int):
    with pytest.raises(ValueError, match=f"a matrix may have .* got {n} × {m}"):
        table(SMALL[0], Matrix(n, m, 1, 0, 0, 0))


@pytest.mark.parametrize("arch", TABLES)
def test_launches_fit_together(arch: str):
    """Kernels that share tables of tiles or workspaces must agree about their sizes; offsets in a tile have 32 bits."""
    for launches in TABLES[arch].values():
        # Rows of a tile times columns of a matrix, and rows of a tile or of a block of columns times the rank.
        tallest = max(x.rows for x in (launches.compensate_project, launches.backproject, launches.reconstruct))
        assert tallest * MAX_COLUMNS <= 2**31
        assert max(tallest, launches.backproject.columns) * MAX_RANK < 2**31
        assert launches.compensate_project.rows == launches.reconstruct.rows
        assert launches.reconstruct.columns % launches.compensate_project.columns == 0
        # The left half walks along the columns' tiles in smaller steps.
        assert launches.compensate_backproject.columns == launches.backproject.columns
        assert launches.backproject.rows % launches.compensate_backproject.rows == 0
        assert launches.compensate_backproject.panel == launches.backproject.panel
        assert launches.gram.panel == launches.orthogonalize.panel
        for launch in (launches.compensate_project, launches.backproject, launches.reconstruct, launches.gram):
            assert launch.panel >= 16
            assert all(size & (size - 1) == 0 for size in (launch.rows, launch.columns, launch.panel))
    # Unknown architectures are served as their vendor's.
    assert select_configuration("sm_70", 4) == select_configuration("sm_80", 4)
    assert select_configuration("sm_86", 4) == TABLES["sm_80"][8]
    assert select_configuration("gfx90a", 4) == select_configuration("gfx942", 4)
    assert architecture(CPU) == "sm_80"


@pytest.mark.parametrize("shapes", [mixed(4), [(9000, 4100, 4)], [(1, 1, 1)], [(50, 3000, 2)] * 40])
def test_tables_cover_everything_once(shapes: list[tuple[int, int, int]]):
    matrices, p, q = [], 0, 0
    for n, m, r in shapes:
        matrices.append(Matrix(n, m, r, p, q, 0))
        p, q = p + n * r, q + m * r
    made = table(*matrices, bypass=[(3000, p), (0, p + 3000), (1, p + 3000)])
    row_tiles, column_tiles = made.row_tiles.tolist(), made.column_tiles.tolist()
    for index, (n, m, _) in enumerate(shapes):
        for tiles, block, depth, length in ((row_tiles, 128, 32, m), (column_tiles, 64, 32, n)):
            mine = [tile[1:] for tile in tiles if tile[0] == index]
            for first, group in itertools.groupby(sorted(mine), lambda tile: tile[0]):
                found = list(group)
                assert first % block == 0
                assert [found[0][1], found[-1][2]] == [0, length]
                assert all(one[2] == other[1] and one[2] % depth == 0 for one, other in itertools.pairwise(found))
                assert [part[3] for part in found] == list(range(len(found)))
            assert len({tile[0] for tile in mine}) == math.ceil((n if tiles is row_tiles else m) / block)
        blocks = [(start, end) for i, start, end in made.rollback.tolist() if i == index]
        assert [blocks[0][0], blocks[-1][1]] == [0, n * m]
        assert all(one[1] == other[0] for one, other in itertools.pairwise(blocks))
    for pack, numel in ((made.pack_P, p + 3001), (made.pack_Q, q + 3001)):
        written = sorted((target, target + size) for _, _, _, target, size, _ in pack.tolist())
        if pack is made.pack_P:
            assert [written[0][0], written[-1][1]] == [0, numel]
            assert all(one[1] == other[0] for one, other in itertools.pairwise(written))
        assert max(end - start for start, end in written) <= COPY_BLOCK


def test_integers_beyond_32_bits():
    """Nothing of these sizes is allocated."""
    n, m, r, far = 2**17 + 1, 2**15 + 3, 4, 2**33
    made = table(Matrix(n, m, r, far, 2 * far, 7), Matrix(3, 2, 1, 3 * far, 4 * far, 8), bypass=[(2000, 5 * far)])
    assert made.records.dtype == torch.int64
    assert made.records[0, :5].tolist() == [n, m, r, far, 2 * far]
    assert made.P.records[1, :4].tolist() == [3, 1, 3 * far, 8]
    assert made.rollback[-2].tolist() == [0, n * m // 2**16 * 2**16, n * m]
    assert made.pack_P[1].tolist() == [1024, 0, 0, 5 * far + 1024, 976, 2]
    assert [made.pack_P[-1, 3], made.pack_Q[-1, 3]] == [3 * far, 4 * far]
    tall = table(Matrix(2**24, 64, 8, 0, 0, 1))
    assert tall.p_parts_numel >= 2**24 * 8
    assert int(tall.row_tiles[-1, 1]) == 2**24 - 128


def test_more_elements_than_32_bits_count(device: torch.device):
    """All but the first and the last rows and columns of the factors are zero. The interpreter gets fewer elements."""
    n, m = (140, 296) if device.type == "cpu" else (2**16 + 3, 2**15 + 8)
    dtype, r, edge = torch.bfloat16, 2, 16
    bucket = Bucket([(5, 7, r)], device, gradient=dtype, error=dtype)
    launches = bucket.launches
    made = BucketTable([Matrix(n, m, r, 0, 0, 1)], [], launches.reconstruct.tile, launches.backproject.tile, device)
    ends = torch.cat([torch.arange(edge), torch.arange(n - edge, n)]).to(device)
    columns = torch.cat([torch.arange(edge), torch.arange(m - edge, m)]).to(device)
    generator = torch.Generator().manual_seed(0)
    P_hat, basis = torch.zeros(n, r, device=device), torch.zeros(m, r, device=device)
    P_hat[ends] = torch.randn(2 * edge, r, generator=generator).to(device)
    basis[columns] = torch.randn(2 * edge, r, generator=generator).to(device)
    G, M = (torch.zeros(n, m, dtype=dtype, device=device) for _ in range(2))
    corner = torch.randn(2, 2 * edge, 2 * edge, generator=generator).to(dtype).to(device)
    for matrix, values in ((G, corner[0]), (M, corner[1])):
        matrix[ends[:, None], columns] = values
    P, Q = torch.full_like(P_hat, NAN), torch.full_like(basis, NAN)
    message = torch.full_like(basis, NAN)
    pointers, sums = made.pointers([G]), torch.full((max(made.p_parts_numel, made.q_parts_numel),), NAN, device=device)
    compensate_project_triton(
        made, pointers, made.pointers([M], bypass=False), (P_hat, basis, bucket.scalar(1.0)),
        bucket.scalar(1.0), basis, launches.compensate_project, out=sums,
    )  # fmt: skip
    pack_triton(made.pack_P, sums, pointers, bucket.finite, own=None, message=P)
    product = P_hat[ends].double() @ basis[columns].double().mT
    truth = corner.double().sum(dim=0) - product
    size = corner.double().abs().sum(dim=0) + P_hat[ends].double().abs() @ basis[columns].double().abs().mT
    error = rounding(r + 2, device) * size
    right = basis[columns].double()
    bound = error @ right.abs() + rounding(2 * edge, device) * ((size + error) @ right.abs())
    assert_within(P[ends], truth @ right, bound)
    assert int(P.count_nonzero()) == int(P[ends].count_nonzero())
    got = M[ends[:, None], columns]
    assert_within(got, truth, error + stored(truth.abs() + error, dtype))
    backproject_triton(made, made.pointers([M], bypass=False), P_hat, launches.backproject, out=sums)
    pack_triton(made.pack_Q, sums, pointers, bucket.finite, own=Q, message=message, bypass=P, workers=1)
    left = P_hat[ends].double()
    bound = rounding(2 * edge, device) * (got.double().abs().mT @ left.abs())
    assert_within(Q[columns], got.double().mT @ left, bound)
    verdict = torch.ones((), device=device)
    reconstruct_triton(made, P_hat, basis, P, made.pack_P, launches.reconstruct, out=pointers, verdict=verdict)
    bound = rounding(r, device) * (left.abs() @ right.abs().mT)
    assert_within(G[ends[:, None], columns], product, bound + stored(product.abs() + bound, dtype))


def test_what_is_refused_is_refused_again():
    made, with_bypass = table(*SMALL), table(*SMALL, bypass=[(3, 15)])
    sizes = "must be contiguous with 15 elements; got shape"
    cases: list[tuple[list[Tensor], type[Exception], str]] = [
        (zeros(24, 15, 3), ValueError, "expected 2 tensors; got 3"),
        ([], ValueError, "expected 2 tensors; got 0"),
        ([torch.zeros(24), torch.zeros(15).bfloat16()], TypeError, r"number 1 is torch\.bfloat16"),
        ([torch.zeros(24), torch.zeros(15, device="meta")], ValueError, "must be on cpu; number 1 is on meta"),
        ([torch.zeros(24), torch.zeros(5, 3).T], ValueError, f"tensor 1 {sizes}"),
        ([torch.zeros(24), torch.zeros(30)[::2]], ValueError, f"tensor 1 {sizes}"),
        (zeros(25, 15), ValueError, r"tensor 0 must be contiguous with 24 elements; got shape \(25,\)"),
        (zeros(24, 14), ValueError, "tensor 1 must be"),
    ]
    for dtype in (torch.float64, torch.int32, torch.uint8, torch.complex64, torch.float8_e5m2):
        refused = "must all be float32, bfloat16 or float16; number 0 is"
        cases.append((zeros(24, 15, dtype=dtype), TypeError, refused))
    for dtype in GRADIENTS:
        odd = torch.frombuffer(torch.zeros(100, dtype=torch.uint8).numpy(), dtype=dtype, count=15, offset=1)
        refused = f"must start at multiples of their elements' {dtype.itemsize} bytes"
        cases.append(([torch.zeros(24, dtype=dtype), odd], ValueError, refused))
    for tensors, error, match in [*cases, *cases]:
        with pytest.raises(error, match=match):
            made.pointers(tensors)
    with pytest.raises(ValueError, match="expected 3 tensors; got 2"):
        with_bypass.pointers(zeros(24, 15))
    with pytest.raises(ValueError, match="expected 2 tensors; got 3"):
        with_bypass.pointers(zeros(24, 15, 3), bypass=False)


def assert_found(pointers: Pointers, tensors: list[Tensor]) -> None:
    found = [pointers.base + distance for distance in pointers.distances.flatten().tolist()]
    assert pointers.dtype == tensors[0].dtype
    assert all(at == tensor.data_ptr() for at, tensor in zip(found, tensors, strict=True) if tensor.numel())


def test_pointers_are_where_the_tensors_are(device: torch.device):
    """Also where others of another dtype were in the same place, and in buffers that move."""
    made = table(*SMALL, bypass=[(0, 15), (3, 15)], device=device)
    for dtypes in ((torch.float32, torch.float32), (torch.float16, torch.bfloat16, torch.float16)):
        memory = zeros(24, 15, 0, 3, device=device, dtype=dtypes[0])
        for dtype in dtypes:
            tensors = [tensor.view(dtype) for tensor in memory]
            assert_found(made.pointers(tensors), tensors)
    # Parts of a buffer that moves need no upload. Nor do tensors without elements, wherever they are.
    distances = set()
    for buffer in [torch.zeros(64, device=device) for _ in range(20)]:
        tensors = [buffer[2:26], buffer[30:45], buffer[55:55], buffer[45:48]]
        pointers = made.pointers(tensors)
        assert_found(pointers, tensors)
        distances.add(id(pointers.distances))
    assert len(distances) == 1


def test_distances_are_kept_and_follow_tensors_that_move(device: torch.device):
    made = table(*SMALL, device=device)
    homes = [zeros(24, 15, device=device) for _ in range(12)]
    first = made.pointers(homes[0])
    for home in homes:
        made.pointers(home)
        # Error buffers stay where they are while gradients move.
        assert made.pointers(homes[0]).distances is first.distances
    # Those that were not used for longest are forgotten, so that nothing grows.
    assert len(made._distances) <= POINTERS
    assert_found(made.pointers(homes[1]), homes[1])


# Programs of one launch end together on GPUs of any number of multiprocessors, and parts add little traffic ---------

MULTIPROCESSORS = {108: "sm_80", 132: "sm_90", 148: "sm_100"}
"""Numbers of multiprocessors: an A100's, an H100's and a B200's."""

LEAST_BUSY = {6: 0.9, 3: 0.85}
"""Share of the time, if all sums in as many parts as they may have make so many programs for each multiprocessor."""

MOST_TRAFFIC = 1 / 8
"""Elements of parts that are written and read, for each element of M that is read."""


def matrices(name: str, rank: int) -> list[list[tuple[int, int, int]]]:
    """(n, m, r) of what is compressed in each bucket that DDP makes of a model; only different buckets."""
    shapes = llama(layers=2, width=4096, hidden=11008) if name == "llama" else MODELS[name]
    buckets = bucket_caps.ddp_buckets({str(number): shape for number, shape in enumerate(shapes)})
    layouts = [Layout.build(bucket, PowerSGDConfig(rank=rank)) for bucket in buckets]
    found = [[(g.n, g.m, g.rank) for g in layout.groups for _ in g.segments] for layout in layouts]
    return [list(bucket) for bucket in dict.fromkeys(map(tuple, found)) if bucket]


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize("rank", [4, 16, 32])
@pytest.mark.parametrize("model", ["gpt2", "resnet-50", "vit-l-16", "llama"])
def test_programs_fill_whole_waves(model: str, rank: int, rows: bool):
    checked = 0
    for bucket, (multiprocessors, arch) in itertools.product(matrices(model, rank), MULTIPROCESSORS.items()):
        configuration = select_configuration(arch, rank)
        launch = configuration.reconstruct if rows else configuration.backproject
        # What is split where programs walk along rows or columns, and the block in which they walk.
        if rows:
            split, block = [(math.ceil(n / launch.rows), m, r) for n, m, r in bucket], launch.columns
        else:
            split, block = [(math.ceil(m / launch.columns), n, r) for n, m, r in bucket], launch.rows
        most = sum(tiles * max(1, size // max(block, 16 * r)) for tiles, size, r in split)
        programs: Counter[int] = Counter()
        for (tiles, size, r), length in zip(split, part_lengths(split, block, multiprocessors), strict=True):
            lengths = [end - start for start, end, _ in parts(size, length)]
            assert sum(lengths) == size
            assert len(lengths) == 1 or 2 * len(lengths) * r / size <= MOST_TRAFFIC
            for length in lengths:
                programs[math.ceil(length / block)] += tiles
        enough = [least for programs_each, least in LEAST_BUSY.items() if most >= programs_each * multiprocessors]
        checked += bool(enough)
        assert busy_share(programs, multiprocessors) >= max(enough, default=0), (bucket, multiprocessors)
    assert checked


def test_small_cases():
    # Of equal programs the share is of whole waves. Short ones run where the long ones leave time.
    for count in (1, 263, 264, 265, 1000):
        assert busy_share({7: count}, 264) == count / (math.ceil(count / 264) * 264)
    assert busy_share({4: 3, 2: 2}, 4) == 1
    assert part_lengths([], 64, 132) == []
    assert part_lengths([(1, 1, 1)], 64, 132) == [64]
    # 300 matrices of different shapes, and 10⁹ elements.
    start = time.process_time()
    part_lengths([(26 + i, 4096 - 8 * i, 32) for i in range(300)], 64, 132)
    part_lengths([(1000, 10**6, 4)], 64, 132)
    assert time.process_time() - start < 1
