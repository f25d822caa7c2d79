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

/** How near the nearest region is to home, as a share of the farthest. */
const NEAREST = 0.8;
export const ORBITS: readonly number[] = [NEAREST, (1 + NEAREST) / 2, 1];

export interface Extent {
  readonly width: number;
  readonly height: number;
  /** Room around the farthest region. */
  readonly margin: readonly [number, number];
}

export const WIDE: Extent = { width: 660, height: 470, margin: [84, 80] };
export const NARROW: Extent = { width: 380, height: 480, margin: [64, 80] };

/** Regions around home: as far out as their weights come late, so that the far ones look far. */
export function placed(regions: readonly Region[], { width, height, margin }: Extent): Placed[] {
  const others = regions.filter((region) => !region.is_home);
  const lags = others.map((region) => Math.log10(1 + 20 * (region.lag_s ?? 1)));
  const least = Math.min(...lags), most = Math.max(...lags);
  const centre = { x: width / 2, y: height / 2 };
  return regions.map((region) => {
    const index = others.indexOf(region);
    if (index < 0) return { region, ...centre };
    const far = most > least ? ((lags[index] ?? 0) - least) / (most - least) : 0.5;
    const angle = -0.35 + (2 * Math.PI * index) / others.length;
    const reach = NEAREST + (1 - NEAREST) * far;
    return { region, x: centre.x + Math.cos(angle) * (width / 2 - margin[0]) * reach, y: centre.y + Math.sin(angle) * (height / 2 - margin[1]) * reach };
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
