// Addresses within the page: #/RUN/TAB/REST…?name=value. Everything that can be seen has one.

export interface Route {
  readonly run: string;
  readonly tab: string;
  /** What a tab makes of it: ["ID", "turn", "3"]. */
  readonly rest: readonly string[];
  readonly options: Readonly<Record<string, string>>;
}

export function parseRoute(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#/, "").split("?", 2);
  const [run = "", tab = "", ...rest] = path.split("/").slice(1).map(decode);
  return { run, tab, rest: rest.filter((part) => part !== ""), options: Object.fromEntries(new URLSearchParams(query)) };
}

/** The address of a place; options that are empty are left out. */
export function routeTo(run: string, tab: string, rest: readonly string[] = [], options: Readonly<Record<string, string>> = {}): string {
  const query = new URLSearchParams(Object.entries(options).filter(([, value]) => value !== ""));
  const path = [run, tab, ...rest].map(encodeURIComponent).join("/");
  return `#/${path}${query.size > 0 ? `?${query}` : ""}`;
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
