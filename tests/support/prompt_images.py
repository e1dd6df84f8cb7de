"""Images of keys and values, laid value by value as ``prefill_images`` says."""

import torch


def images_of(keys, values):
    """Return images [S, J, P] each of keys and values [S, J, P], S a multiple of 128."""
    num, heads, dims = keys.shape
    place = torch.arange(dims)
    dim_at = place // 32 * 32 + place % 8 // 2 * 8 + place % 32 // 8 * 2 + place % 2
    by_image = [t[..., dim_at].reshape(num // 128, 128, heads, dims) for t in (keys, values)]
    found = []
    for rows in (by_image[0].permute(0, 2, 1, 3), by_image[1].permute(0, 2, 3, 1)):
        n, k = torch.meshgrid(torch.arange(rows.shape[2]), torch.arange(rows.shape[3]), indexing="ij")
        at = k // 64 * rows.shape[2] * 64 + n * 64 + (k % 64 // 8 ^ n % 8) * 8 + k % 8
        image = torch.empty(*rows.shape[:2], rows.shape[2] * rows.shape[3], dtype=keys.dtype)
        image[..., at.flatten()] = rows.flatten(2)
        found.append(image.reshape(num, heads, dims).to(keys.device))
    return tuple(found)
