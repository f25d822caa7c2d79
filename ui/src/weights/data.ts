// Nouns of the tab "Weights", and the pure half of its drawings.

import { significant } from "../format";

export interface Version {
  readonly version: number;
  readonly base: number | null;
  readonly kind: "full" | "delta";
  readonly size_bytes: number;
  readonly packs: number;
  readonly digest: string;
  readonly created: string;
  readonly writer: string;
  readonly changed: boolean | null;
  readonly seconds: number | null;
  readonly blocked_s: number | null;
  readonly lags: Readonly<Record<string, number>>;
  readonly links: readonly { readonly kind: string; readonly source: number | null; readonly size_bytes: number }[];
  readonly served_by: readonly string[];
  readonly release: string | null;
}

export interface Engine {
  readonly name: string;
  readonly region: string;
  readonly version: number | null;
  readonly behind: number | null;
  readonly since_s: number | null;
  readonly seen_s: number;
  readonly lag_s: number | null;
  readonly lag_last_s: number | null;
  readonly stage_ms: number | null;
  readonly pause_ms: number | null;
  readonly busy: number | null;
  readonly running: number | null;
  readonly waiting: number | null;
  readonly tokens_per_s: number | null;
}

export interface Weights {
  readonly log_id: string | null;
  readonly store: string;
  readonly problem: string;
  readonly newest: number | null;
  readonly total: number;
  readonly state_bytes: number | null;
  readonly versions: readonly Version[];
  readonly engines: readonly Engine[];
  readonly regions: readonly { readonly region: string; readonly mean_s: number; readonly max_s: number; readonly last_s: number }[];
}

export interface History {
  readonly version: readonly number[];
  readonly kind: readonly string[];
  readonly size_bytes: readonly number[];
  readonly seconds: readonly number[];
  readonly blocked_s: readonly number[];
  readonly lags: Readonly<Record<string, readonly (number | null)[]>>;
}

export type Health = "well" | "waits" | "ill" | "gone" | "unknown";

export interface Process {
  readonly name: string;
  readonly command: string;
  readonly health: Health;
  readonly state: string;
  readonly host: string;
  readonly pid: number | null;
  readonly restarts: number | null;
  readonly memory_bytes: number | null;
  readonly is_lent: boolean;
  readonly version: number | null;
  readonly busy: number | null;
  readonly running: number | null;
}

export interface Region {
  readonly name: string;
  readonly is_home: boolean;
  readonly store: string;
  readonly remark: string;
  readonly supervisor?: string;
  readonly observed_age_s?: number | null;
  readonly lent_engines?: number;
  readonly engines?: number;
  readonly version: number | null;
  readonly behind: number | null;
  readonly lag_s: number | null;
  readonly sessions: number | null;
  readonly is_away: boolean;
  readonly told_age_s?: number;
  readonly sandboxes: string;
  readonly sandbox_hosts: number;
  readonly processes: readonly Process[];
}

export interface Fleet {
  readonly kind: "machine" | "fleet";
  readonly generation: number | null;
  readonly launcher: string;
  readonly regions: readonly Region[];
  readonly problem: string;
}

export const HOME = "home";
export const regionName = (region: string): string => region || HOME;

export interface Placed {
  readonly region: Region;
  readonly x: number;
  readonly y: number;
}

const WORST: readonly Health[] = ["ill", "gone", "unknown", "waits", "well"];

/** The health of a region: that of its worst process, away above all. */
export function healthOf(region: Region): Health {
  if (region.is_away) return "ill";
  return WORST.find((health) => region.processes.some((process) => process.health === health)) ?? "unknown";
}

/** The extent of a map, where home is in it, and how far out the latest region is. */
export interface Extent {
  readonly width: number;
  readonly height: number;
  readonly home: readonly [number, number];
  readonly reach: readonly [number, number];
}

export const WIDE: Extent = { width: 660, height: 430, home: [330, 352], reach: [272, 288] };
export const NARROW: Extent = { width: 380, height: 440, home: [190, 362], reach: [136, 300] };
/** How far out the promptest region is, as a share of the latest: home needs room. */
const NEAREST = 0.5;
const ORBITS = [0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000];

/** The lags of a fleet as distances from home, on a logarithmic scale; what is not measured is far. */
export function scale(regions: readonly Region[]): { distance: (lag_s: number | null) => number; orbits: readonly number[] } {
  const lags = regions.filter(({ is_home }) => !is_home).flatMap(({ lag_s }) => (lag_s !== null && lag_s > 0 ? [Math.log(lag_s)] : []));
  const low = Math.min(...lags), high = Math.max(low + 0.7, ...lags);
  if (lags.length === 0) return { distance: () => 1, orbits: [] };
  const distance = (lag_s: number | null) => (lag_s === null || lag_s <= 0 ? 1 : NEAREST + ((1 - NEAREST) * (Math.log(lag_s) - low)) / (high - low));
  return { distance, orbits: ORBITS.filter((lag_s) => distance(lag_s) > 0.3 && distance(lag_s) < 1.05) };
}

/** Regions fanned out above home, as far as their weights come late. */
export function placed(regions: readonly Region[], { home, reach }: Extent): Placed[] {
  const others = regions.filter((region) => !region.is_home);
  const { distance } = scale(regions);
  return regions.map((region) => {
    const index = others.indexOf(region);
    if (index < 0) return { region, x: home[0], y: home[1] };
    const angle = Math.PI * (1 - (index + 0.5) / others.length), far = distance(region.lag_s);
    return { region, x: home[0] + Math.cos(angle) * reach[0] * far, y: home[1] - Math.sin(angle) * reach[1] * far };
  });
}

/** Processes as points on a ring around a region. */
export function ring(region: Region, radius: number): { process: Process; x: number; y: number }[] {
  const number = region.processes.length;
  return region.processes.map((process, index) => {
    const angle = -Math.PI / 2 + (2 * Math.PI * index) / Math.max(1, number);
    return { process, x: Math.cos(angle) * radius, y: Math.sin(angle) * radius };
  });
}

/** A time that may be short: 4.7 ms, 0.34 s, 12 s. */
export function seconds(value: number | null): string {
  if (value === null) return "–";
  return value < 0.1 ? `${significant(1000 * value, 2)} ms` : value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
}

/** A region in words. */
export function describe(region: Region): string {
  const counts = WORST.map((health) => [health, region.processes.filter((process) => process.health === health).length] as const);
  const parts = counts.filter(([, number]) => number > 0).map(([health, number]) => `${number} ${health}`);
  const serves = region.version === null ? "serves nothing yet" : `serves version ${region.version}${region.behind ? `, ${region.behind} behind` : ""}`;
  const away = region.is_away ? "away; " : "";
  return `${region.name}${region.is_home ? ", home" : ""}: ${away}${serves}; processes: ${parts.join(", ") || "none"}${region.remark ? `; ${region.remark}` : ""}`;
}
