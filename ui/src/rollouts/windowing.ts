// Which rows of a long table are in sight, and which pages hold them.

export const PAGE_ROWS = 100;

/** Pages that hold the rows from `first` up to `last`, and one on either side. */
export function pagesOf(first: number, last: number, total: number): number[] {
  const end = Math.max(0, Math.ceil(total / PAGE_ROWS) - 1);
  const from = Math.max(0, Math.floor(first / PAGE_ROWS));
  const to = Math.min(end, Math.floor(Math.max(first, last - 1) / PAGE_ROWS));
  return Array.from({ length: Math.max(0, to - from + 1) }, (_, index) => from + index);
}

/** Rows from `first` up to `last` of a list of `total`: those in a viewport, and some around it. */
export function rowsInSight(scrollTop: number, height: number, rowHeight: number, total: number, around = 12): [number, number] {
  const first = Math.max(0, Math.floor(scrollTop / rowHeight) - around);
  return [Math.min(first, total), Math.min(total, Math.ceil((scrollTop + height) / rowHeight) + around)];
}
